"""What baselines share: logits by cuBLAS, compiled steps, FlashInfer's calls, gathering, penalties.

Loaded with the sampler files when samplers are listed, and lazy as they are: without torch.

May import: simple, the contract.
"""
