"""How large a screened head may be, and what its copy takes. Needs no torch."""

LARGEST_CODE = 127
LARGEST_D = 131_072
"""Sums of D products of two bytes are below 2^31: 127 * 128 * 131,072 < 2^31."""


def extra_bytes(V: int, D: int) -> int:
    """What a copy takes beside a weight [V, D]."""
    return V * (D + 12)
