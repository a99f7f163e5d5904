"""fsbench: how fast is exact sampling fused into the LM-head matmul, against everything else?"""

__version__ = "0.2.0"
