"""Variants of the kernels that draw from stored logits under filters: the first look, and the rows
that it leaves to many programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from fsbench.kernels.truncated.kept import WARPS
from fsbench.kernels.truncated.launch import CUTOFF, LOOK, ROW_WARPS, chunk, is_small
from fsbench.kernels.truncated.top_p import WARPS as REDRAW_WARPS
from kernel_variants.variant import CAPABILITIES, TUNED, Variant, kernel, variant

HISTORY = ("history_ptr", "counts_ptr", "lengths_ptr")
AMOUNTS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
PER_ROW = ("seed", "offset", "top_k", *AMOUNTS)
EVERYTHING = ("history", "cuts", "per row")
WITH_TESTS = ("per row", "tests")
"""Options of the first look."""

TYPES = {
    "logits_ptr": "*fp32",
    "largest_ptr": "*fp32",
    "found_ptr": "*i32",
    "keys_ptr": "*i64",
    "plan_ptr": "*i64",
    "numbers_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "before_ptr": "*fp32",
    "tops_ptr": "*fp32",
    "arrivals_ptr": "*i32",
    "undecided_ptr": "*i32",
    "gathered_ptr": "*i64",
    "seed_ptr": "*i64",
    "offset_ptr": "*i64",
    "top_k": "i32",
    **dict.fromkeys(AMOUNTS, "fp32"),
    **dict.fromkeys(HISTORY, "*i32"),
    "tokens_ptr": "*i64",
    "valid_ptr": "*i1",
    "cuts_ptr": "*i64",
    "masses_ptr": "*i64",
    "kept_ptr": "*i32",
    "support_ptr": "*i64",
    **dict.fromkeys(
        ("V", "capacity", "launch", "B", "stride", "blocks", "limit", "programs"), "i32"
    ),
    **dict.fromkeys(("turn", "turns"), "i32"),
}
LOOK_KERNEL = kernel("kernels.truncated.look", "sampling_look_kernel")
ROW_KERNELS = {
    name: kernel("kernels.truncated.rows", f"{name}_kernel")
    for name in ("sampling_cutoff", "sampling_race")
}
NARROW_KERNEL = kernel("kernels.truncated.narrow", "sampling_narrow_kernel")
REDRAW_KERNEL = kernel("kernels.truncated.redraw", "sampling_redraw_kernel")

SAYING_KERNELS = {
    name: kernel("kernels.truncated.kept", f"{name}_kernel")
    for name in ("sampling_kept", "sampling_support")
}


def _look(V: int, top_k: int, capability: int, given: Collection[str] = ()) -> Variant:
    """The first look at rows of V logits, with the options that are `given`."""
    types = {**TYPES}
    if "per row" in given:
        types |= {**dict.fromkeys(AMOUNTS, "*fp32"), "top_k": "*i64"}
    absent = [*([] if "history" in given else HISTORY), *([] if "cuts" in given else ["cuts_ptr"])]
    if is_small(top_k):
        absent += ["plan_ptr", "numbers_ptr"]
    constants: dict[str, Any] = {
        **dict.fromkeys(absent),
        **{f"{name.upper()}_PER_ROW": "per row" in given for name in PER_ROW},
        "GROUPS": 1 << (-(-V // 128) * 4 - 1).bit_length(),
        "CHUNK": chunk(top_k),
        "TESTS": "tests" in given,
        "EARLY": capability >= TUNED,
    }
    words = "everything" if len(given) == len(EVERYTHING) else " ".join(given)
    name = f"V={V} k={top_k} {words}".strip()
    return variant("sampling_look", name, LOOK_KERNEL, types, constants, capability, **LOOK)


def _row_kernels(
    capability: int, rows: int = 256, cuts: bool = False, per_row: bool = False
) -> Iterator[Variant]:
    """The kernels with many programs per row. rows: a power of two, at least B.

    cuts: cutoffs are asked for, so none is TESTED.
    """
    constants: dict[str, Any] = {**({} if cuts else {"cuts_ptr": None}), "ROWS": rows}
    constants |= dict.fromkeys(("SEED_PER_ROW", "OFFSET_PER_ROW"), per_row)
    constants["EARLY"] = capability >= TUNED
    words = f"ROWS={rows}" + " cuts" * cuts + " per row" * per_row
    if cuts:
        constants |= dict.fromkeys(("tops_ptr", "masses_ptr", "before_ptr"))
    for name, function in ROW_KERNELS.items():
        options = CUTOFF if name == "sampling_cutoff" else {"num_warps": ROW_WARPS}
        yield variant(name, words, function, TYPES, constants, capability, **options)
    later = {"before_ptr": None, "RACE": False}
    turns: dict[str, dict[str, Any]] = {"": {"RACE": False}}
    if not cuts:
        turns |= {" race": {**later, "RACE": True}, " later": later}
    for turn, given in turns.items():
        own = {**constants, **given}
        yield variant(
            "sampling_narrow",
            words + turn,
            NARROW_KERNEL,
            TYPES,
            own,
            capability,
            num_warps=ROW_WARPS,
        )


def _redraws(capability: int, rows: int = 256, per_row: bool = False) -> Iterator[Variant]:
    """The kernel of top-p alone, for all rows and for some."""
    types = {**TYPES, **(dict.fromkeys(AMOUNTS, "*fp32") if per_row else {}), "top_p": "fp32"}
    names = ("SEED_PER_ROW", "OFFSET_PER_ROW", "TEMPERATURE_PER_ROW")
    constants: dict[str, Any] = {**dict.fromkeys(names, per_row), "ROWS": rows}
    constants["EARLY"] = capability >= TUNED
    turns = {"first": (True, False, False), "race": (False, True, False)}
    turns |= {"test": (False, False, False), "last": (False, False, True)}
    for turn, flags in turns.items():
        yield variant(
            *("sampling_redraw", f"ROWS={rows}{' per row' * per_row} {turn}", REDRAW_KERNEL, types),
            {**constants, **dict(zip(("FIRST", "RACE", "LAST"), flags, strict=True))},
            capability,
            num_warps=REDRAW_WARPS,
        )


def _saying(capability: int) -> Iterator[Variant]:
    """The kernels that say something of what is kept, or of all tokens."""
    types = {**TYPES, "temperature": "*fp32"}
    constants: dict[str, Any] = {"TEMPERATURE_PER_ROW": True, "ROOM": 1024}
    options = {"capability": capability, "num_warps": WARPS}
    for name, function in SAYING_KERNELS.items():
        yield variant(name, "kept", function, types, constants, **options)
    constants |= dict.fromkeys(("cuts_ptr", "kept_ptr", "keys_ptr"))
    yield variant(
        "sampling_kept", "all", SAYING_KERNELS["sampling_kept"], types, constants, **options
    )


def variants() -> Iterator[Variant]:
    """Three vocabularies, each way to choose a row's tokens, and every option."""
    for capability in CAPABILITIES:
        yield from _row_kernels(capability)
        yield from _row_kernels(capability, cuts=True, per_row=True)
        yield from _saying(capability)
        yield _look(32_000, 50, capability)
        yield _look(128_256, 50, capability)
        yield _look(151_936, 0, capability, EVERYTHING)
    yield from _row_kernels(TUNED, rows=32)
    for capability in CAPABILITIES:
        yield from _redraws(capability)
    yield from _redraws(TUNED, rows=32, per_row=True)
    for top_k in (50, 1000, 0):  # one launch; as many as fit one program; a search
        yield _look(151_936, top_k, TUNED)
    yield _look(151_936, 50, TUNED, EVERYTHING)
    for given in (*((option,) for option in EVERYTHING), WITH_TESTS):
        yield _look(151_936, 0, TUNED, given)
