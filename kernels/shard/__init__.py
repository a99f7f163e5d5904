"""A vocabulary over several GPUs: `VocabShard`, and how its ranks exchange candidates.

May import: device, checks, noise, configs.
"""

AREAS = 3
"""Of slots, in the ranks' buffers: candidates, their logits, and the masses of rows."""
