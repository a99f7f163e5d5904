"""Device code that several kernels share: matmul, epilogue, sums of exp, stored logits.

May import: noise, configs.
"""
