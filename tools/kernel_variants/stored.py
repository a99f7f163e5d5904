"""Variants of the kernels that are launched on logits, candidates, masks or the weight alone."""

from __future__ import annotations

from collections.abc import Iterator

from fsbench.baselines import weight_stream
from fsbench.kernels import (
    akunu_exact,
    akunu_faithful,
    flash_sampling_two_step,
    group_gumbel_parallel,
    gumbel_argmax,
    pivot_search,
)
from fsbench.kernels.call.pack_mask import BLOCK as PACKED
from fsbench.kernels.flash_sampling_gather import ROWS_AT_ONCE as GATHERED
from fsbench.kernels.noise.map import CODES_AT_ONCE as MAPPED
from fsbench.kernels.shard.merge_keys import ROWS_AT_ONCE as MERGED
from kernel_variants.variant import CAPABILITIES, TUNED, Variant, kernel, variant

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PARAMETERS = {
    "*i64": (
        *("seed_ptr", "offset_ptr", "keys_ptr", "tokens_ptr", "words_ptr", "buffers_ptr"),
        "codes_ptr",
    ),
    "*i32": ("arrivals_ptr", "parts_ptr", "counts_ptr"),
    "*fp32": (
        *("masses_ptr", "log_z_ptr", "logz_ptr", "exponential_ptr", "gumbel_ptr", "partial_ptr"),
    ),
    "*fp16": ("scores_ptr",),
    "*i1": ("mask_ptr",),
    "fp32": ("temperature", "scale", "top_p", "min_p"),
    "i32": (
        *("V", "B", "K", "n", "groups", "splits", "first_token", "rank", "area", "top_k"),
        *("num_elements", "stride"),
    ),
}
TYPES = {name: kind for kind, names in PARAMETERS.items() for name in names}
FILTERS_PER_ROW = {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}


def _dtype(name: str) -> dict[str, str]:
    return {**TYPES, "logits_ptr": f"*{name}", "weight_ptr": f"*{name}"}


def _akunu(capability: int) -> Iterator[Variant]:
    yield variant(
        "akunu_faithful",
        "bf16",
        kernel("kernels.providing.akunu", "akunu_faithful_kernel"),
        _dtype("bf16"),
        {"BLOCK": akunu_faithful.TOKENS_AT_ONCE},
        capability,
        num_warps=akunu_faithful.NUM_WARPS,
    )
    exact = kernel("kernels.providing.akunu", "akunu_exact_kernel")
    search = kernel("kernels.pivot_search", "pivot_search_kernel")
    for dtype, per_row in (("bf16", False), ("bf16", True), ("fp32", False)):
        if dtype == "fp32" and capability != TUNED:
            continue
        types = _dtype(dtype) | (FILTERS_PER_ROW if per_row else {})
        words = f"{dtype} per row" if per_row else dtype
        wide = 16 // BYTES[dtype]
        constants = {"PER_ROW": per_row, "WIDE": wide, "TURNS": 64 // wide}
        yield variant(
            "akunu_exact", words, exact, types, constants, capability,
            num_warps=akunu_exact.NUM_WARPS,
        )  # fmt: skip
        constants = {"PER_ROW": per_row, "BLOCK": pivot_search.TOKENS_AT_ONCE}
        yield variant(
            "pivot_search", words, search, types, constants, capability,
            num_warps=pivot_search.NUM_WARPS,
        )  # fmt: skip


def _stored_logits(capability: int) -> Iterator[Variant]:
    """One pass over stored logits, and one group per program."""
    one_pass = kernel("kernels.gumbel_argmax", "gumbel_argmax_kernel")
    forms = [("bf16", False, True), ("bf16", False, False), ("bf16", True, False)]
    for dtype, greedy, keys in [*forms, ("fp32", False, False)]:
        words = [dtype, *(["greedy"] if greedy else []), *(["candidates"] if keys else [])]
        yield variant(
            "gumbel_argmax",
            " ".join(words),
            one_pass,
            _dtype(dtype),
            {"KEYS": keys, "GREEDY": greedy, "BLOCK": gumbel_argmax.TOKENS_AT_ONCE},
            capability,
            num_warps=gumbel_argmax.NUM_WARPS,
        )
    for dtype in ("bf16", "fp32"):
        yield variant(
            "group_gumbel_parallel",
            f"{dtype} group",
            kernel("kernels.group_gumbel_parallel", "local_sample_kernel"),
            _dtype(dtype),
            {"GROUP": group_gumbel_parallel.TOKENS_OF_GROUP},
            capability,
            num_warps=group_gumbel_parallel.NUM_WARPS,
        )
    yield variant(
        "group_gumbel_parallel",
        "choice of a group",
        kernel("kernels.group_gumbel_parallel", "sample_group_kernel"),
        TYPES,
        {"BLOCK": 256},
        capability,
        num_warps=group_gumbel_parallel.NUM_WARPS,
    )


def _small(capability: int) -> Iterator[Variant]:
    """Kernels of one constant, the block: (family, name, module, kernel, types, block)."""
    gather = "kernels.flash_sampling_gather"
    words = {**TYPES, "words_ptr": "*i32"}
    for family, name, module, function, types, block in (
        ("merge_keys", "", "kernels.shard.merge_keys", "merge_keys_kernel", TYPES, MERGED),
        ("flash_sampling_gather", "pack", gather, "pack_kernel", TYPES, GATHERED),
        ("flash_sampling_gather", "choose", gather, "choose_rank_kernel", TYPES, GATHERED),
        ("pack_mask", "", "kernels.call.pack_mask", "pack_mask_kernel", words, PACKED),
        ("noise_map", "", "kernels.noise.map", "noise_map_kernel", TYPES, MAPPED),
    ):
        constants = {"BLOCK": block}
        yield variant(
            family, name, kernel(module, function), types, constants, capability, num_warps=4
        )


def _others(capability: int) -> Iterator[Variant]:
    """The weight stream, and the exchange of candidates in a launch of its own."""
    for dtype, size in BYTES.items():
        yield variant(
            "weight_stream",
            dtype,
            kernel("baselines.weight_stream", "weight_stream_kernel"),
            _dtype(dtype),
            {
                "LOADS": weight_stream.LOADS,
                "BLOCK": weight_stream.NUM_WARPS * 32 * weight_stream.LOAD_BYTES // size,
                "NUM_STAGES": weight_stream.NUM_STAGES,
            },
            capability,
            num_warps=weight_stream.NUM_WARPS,
        )
    for ranks in (2, 4, 8):
        yield variant(
            "flash_sampling_two_step",
            f"{ranks} ranks",
            kernel("kernels.flash_sampling_two_step", "exchange_kernel"),
            TYPES,
            {"RANKS": ranks, "WATCH": True, "BLOCK": flash_sampling_two_step.ROWS_AT_ONCE},
            capability,
            num_warps=4,
        )


def variants() -> Iterator[Variant]:
    """Every kernel for every compute capability; dtypes and numbers per row where it matters."""
    for capability in CAPABILITIES:
        yield from _akunu(capability)
        yield from _stored_logits(capability)
        yield from _small(capability)
        yield from _others(capability)
