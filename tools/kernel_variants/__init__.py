"""The list of every kernel variant that is shipped: every config in the tables, with every option.

Tests compile it for GPUs that are not there, and tools/compare_kernels.py compares the machine code
of two trees by it. Every option is in some variant, on its own or with all others; not every config
is there with every option. Arguments are taken as multiples of 16 where they usually are, and no
number is taken as 1 (a launch of one sample is compiled for exactly that, too).

A new kernel, config or option is added here.
"""

from __future__ import annotations

from collections.abc import Collection

from kernel_variants import fused, screened, stored, truncated
from kernel_variants.variant import Variant


def every_variant() -> list[Variant]:
    """All of them; of variants that are identical, the first."""
    found: dict[str, Variant] = {}
    for part in (fused, screened, truncated, stored):
        for variant in part.variants():
            found.setdefault(variant.content, variant)
    listed = list(found.values())
    names = {(variant.family, variant.name, variant.capability) for variant in listed}
    assert len(names) == len(listed), "two different variants have the same name"
    return listed


ALONE = (
    *("soft cap", "bias", "row bias", "mask", "logprob", "logz"),
    *("seeds", "offsets", "temperatures", "candidates", "n = 4", "4 ranks"),
    *("stores without largest", "stores with everything", "box of 8", "box of 32"),
)
"""Ends of the names of variants with one option, or one size, that others have among more."""


def selected(
    families: Collection[str] = (),
    capabilities: Collection[int] = (),
    quick: bool = False,
    alone: bool = True,
) -> list[Variant]:
    """The variants of some families and compute capabilities; all, where none are named.

    quick: the first of each family only, for compute capability 9.0.
    alone: also those with one option, which the variants with everything have, too.
    """
    listed = [
        variant
        for variant in every_variant()
        if (not families or variant.family in families)
        and (not capabilities or variant.capability in capabilities)
        and (alone or not variant.name.endswith(ALONE))
    ]
    if not quick:
        return listed
    first: dict[str, Variant] = {}
    for variant in listed:
        if variant.capability == 90:
            first.setdefault(variant.family, variant)
    return list(first.values())
