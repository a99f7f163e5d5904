"""What the baselines share: matmul, logits, penalties, sorting, FlashInfer, the CPU samplers.

May import: errors, problem, provider, simple.
"""
