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

from kernel_variants import fused, screened, screened_filters, stored, truncated
from kernel_variants.variant import TUNED, Variant


def every_variant() -> list[Variant]:
    """All of them; of variants that are identical, the first."""
    found: dict[str, Variant] = {}
    for part in (fused, screened, screened_filters, truncated, stored):
        for variant in part.variants():
            found.setdefault(variant.content, variant)
    listed = list(found.values())
    names = {(variant.family, variant.name, variant.capability) for variant in listed}
    assert len(names) == len(listed), "two different variants have the same name"
    return listed


ALONE = (
    *("soft cap", "bias", "row bias", "mask", "logprob", "logz"),
    *("seeds", "offsets", "temperatures", "n = 4", "4 ranks", "candidates"),
    *("stores without largest", "stores with everything", "1 x 8 rows", "2 x 16 rows"),
    "fp16 token",
)
"""What variants have, by the ends of their names, that others have among more."""
OF_EACH_CONFIG = ("bf16 group", "bf16 token", "bf16 none", "bf16 group stores")
"""Ends of the names of variants that show what a config needs; others show what an option does.

Where nobody has tuned the configs, the first of these does, and the others are compiled once, of
the largest config that has them: of its accumulators there are the most to keep.
"""
FEWER = ("2 ranks", "everything, n = 1")
"""What is left out there beside: more ranks, and more samples, are compiled."""

MORE = re.compile("everything|pointers|greedy|per row|k=|choice|2 ranks")
"""What is compiled of the other families beside a first variant of each config."""


def selected(
    families: Collection[str] = (),
    capabilities: Collection[int] = (),
    quick: bool = False,
    brief: bool = False,
) -> list[Variant]:
    """The variants of some families and compute capabilities; all, where none are named.

    quick: the first of each family only, for compute capability 9.0.
    brief: every config, and every option once; an option alone only where none has it among more;
    for GPUs that no config is tuned for, still less.
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
    guessed = [variant for variant in reversed(listed) if variant.capability != TUNED]
    for variant in [variant for variant in listed if variant.capability == TUNED] + guessed:
        tuned = variant.capability == TUNED
        config, _, what = variant.name.partition(" ")
        fused = variant.family.startswith("flash_sampling")
        # Beside the fused kernels, what a config needs shows in its first variant.
        shown = what if fused else config
        once = (variant.family, variant.capability, shown)
        of_each = OF_EACH_CONFIG if tuned else OF_EACH_CONFIG[:1]
        known = once in seen and not (what in of_each if fused else MORE.search(what))
        option = what.removeprefix("bf16 group ")
        if known or option in ALONE or (not tuned and option in FEWER):
            continue
        seen.add(once)
        left.append(variant)
    return left
