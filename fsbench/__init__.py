"""fsbench: benchmark of exact sampling fused into the LM-head matmul, and its alternatives."""

__version__ = "0.2.0"
