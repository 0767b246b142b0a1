"""Makes contrib.npz, outputs by ONNX Runtime 1.32.0: ``pip install onnx onnxruntime numpy && python make_contrib.py``.

Keys: ``<case>/<number of the output that is asked for>``, float32; the cases are STORED in contrib_cases.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from contrib_cases import CASES, STORED, arrays, model  # noqa: E402

stored = {}
for case in CASES:
    if case[0] in STORED:
        feeds = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in arrays(case).items()}
        session = onnxruntime.InferenceSession(model(case).SerializeToString(), providers=["CPUExecutionProvider"])
        stored |= {f"{case[0]}/{i}": array for i, array in enumerate(session.run(None, feeds))}
np.savez_compressed(FOLDER / "contrib.npz", **stored)
