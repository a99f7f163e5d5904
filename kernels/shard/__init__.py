"""A vocabulary over several GPUs: `VocabShard`, and how its ranks exchange candidates.

May import: device, checks, noise, configs.
"""

AREAS = 7
"""Of slots, in the ranks' buffers: candidates, their logits, and five for the masses of rows."""
