"""Code that sampler files share: launches as the harness times them, tuning, the matmul alone.

Imported with the sampler files when samplers are listed; imports torch lazily.

May import: everything below the sampler files.
"""
