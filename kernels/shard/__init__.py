"""A vocabulary over several GPUs: `VocabShard`, and the exchange of candidates by its ranks.

May import: device, checks, noise, configs.
"""

AREAS = 7
"""Areas of slots in a rank's buffer: candidates, their logits, and five for the masses of rows."""
