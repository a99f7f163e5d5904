"""The list of every kernel variant that is shipped: every config in the tables, with every option.

Tests compile it for GPUs that are not there, and tools/compare_kernels.py compares the machine code
of two trees by it. Every option is in some variant, on its own or with all others; not every config
is there with every option. Arguments are taken as multiples of 16 where they usually are, and no
number is taken as 1 (a launch of one sample is compiled for exactly that, too).

A new kernel, config or option is added here.
"""

from __future__ import annotations

import re
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
    *("seeds", "offsets", "temperatures", "n = 4", "4 ranks", "candidates"),
    *("stores without largest", "stores with everything", "box of 8", "box of 32"),
)
"""What variants have, by the ends of their names, that others have among more."""
OF_EACH_CONFIG = ("bf16 group", "bf16 token", "bf16 none", "bf16 group stores")
"""Ends of the names of variants that show what a config needs; others show what an option does."""


MORE = re.compile("everything|pointers|greedy|per row|k=|choice")
"""What is compiled of the other families beside a first variant of each config."""


def selected(
    families: Collection[str] = (),
    capabilities: Collection[int] = (),
    quick: bool = False,
    brief: bool = False,
) -> list[Variant]:
    """The variants of some families and compute capabilities; all, where none are named.

    quick: the first of each family only, for compute capability 9.0.
    brief: every config, and every option once; an option alone only where none has it among more.
    """
    listed = [
        variant
        for variant in every_variant()
        if (not families or variant.family in families)
        and (not capabilities or variant.capability in capabilities)
    ]
    if brief:
        listed = _brief(listed)
    if not quick:
        return listed
    first: dict[str, Variant] = {}
    for variant in listed:
        if variant.capability == 90:
            first.setdefault(variant.family, variant)
    return list(first.values())


def _brief(listed: list[Variant]) -> list[Variant]:
    """Those that `selected` says."""
    seen: set[tuple[str, int, str]] = set()
    left = []
    for variant in listed:
        config, _, what = variant.name.partition(" ")
        fused = variant.family.startswith("flash_sampling")
        # Beside the fused kernels, what a config needs shows in its first variant.
        shown = what if fused else config
        once = (variant.family, variant.capability, shown)
        known = once in seen and not (what in OF_EACH_CONFIG if fused else MORE.search(what))
        if known or what.removeprefix("bf16 group ") in ALONE:
            continue
        seen.add(once)
        left.append(variant)
    return left
