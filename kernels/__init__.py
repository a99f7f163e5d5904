"""The fused kernels and what shares their device code: one sampler per file."""
