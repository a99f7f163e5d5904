"""A vocabulary over several GPUs: `VocabShard`, and how its ranks exchange candidates.

May import: device, checks, noise, configs.
"""

AREAS = 5
"""Of slots, in the ranks' buffers: candidates, their logits, and three for the masses of rows."""
