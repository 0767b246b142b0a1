"""ortc: a declarative graph-rewriting compiler for training graphs."""

__version__ = "0.1.0"
