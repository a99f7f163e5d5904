"""Code that baselines share: logits by cuBLAS, compiled steps, FlashInfer's calls, gathering.

Imported with the sampler files when samplers are listed; imports torch lazily.

May import: simple, the contract.
"""
