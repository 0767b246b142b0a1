"""What the runtime tells a person beside its results."""

from __future__ import annotations

import sys


def tell(text: str) -> None:
    """A line on stderr, as the command line's own messages are."""
    print(f"ortc: {text}", file=sys.stderr)
