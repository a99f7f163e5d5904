"""A vocabulary over several GPUs: `VocabShard`, and the exchange of candidates by its ranks.

May import: device, checks, noise, configs.
"""

AREAS = 8
"""Areas of slots in a rank's buffer.

Candidates, their logits, five for the masses of rows, and the lower bounds of a screen."""
