"""What sampler files share: launches as the harness times them, tuning, the matmul alone.

Loaded with the sampler files when samplers are listed, and lazy as they are: without torch.

May import: everything below the sampler files.
"""
