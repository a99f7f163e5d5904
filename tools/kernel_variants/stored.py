"""Variants of the kernels that are launched on logits, candidates, masks or the weight alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsbench.baselines import weight_stream
from fsbench.kernels import (
    akunu_exact,
    akunu_faithful,
    flash_sampling_two_step,
    group_gumbel_parallel,
    pivot_search,
)
from fsbench.kernels.drafting.launch import TOKENS_AT_ONCE as DRAFTED
from fsbench.kernels.flash_sampling_gather import ROWS_AT_ONCE as GATHERED
from fsbench.kernels.launch.operands import WORDS_AT_ONCE as PACKED
from fsbench.kernels.noise.map import CODES_AT_ONCE as MAPPED
from fsbench.kernels.providing import one_pass
from fsbench.kernels.scoring.slopes import BLOCK as SLOPES
from fsbench.kernels.shard.merge_keys import ROWS_AT_ONCE as MERGED
from kernel_variants.variant import CAPABILITIES, TUNED, Variant, kernel, variant

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PARAMETERS = {
    "*i64": (
        *("seed_ptr", "offset_ptr", "keys_ptr", "tokens_ptr", "words_ptr", "buffers_ptr"),
        *("codes_ptr", "ids_ptr", "targets_ptr", "sampled_ptr", "drafts_ptr", "parents_ptr"),
        *("num_accepted_ptr", "nodes_ptr"),
    ),
    "*i32": ("arrivals_ptr", "parts_ptr", "counts_ptr"),
    "*fp32": (
        *("masses_ptr", "log_z_ptr", "logz_ptr", "exponential_ptr", "gumbel_ptr", "partial_ptr"),
        *("noise_ptr", "numbers_ptr", "g_ptr"),
    ),
    "*fp16": ("scores_ptr",),
    "*i1": ("mask_ptr", "refused_ptr"),
    "fp32": ("temperature", "scale", "top_p", "min_p", "soft_cap"),
    "i32": (
        *("V", "B", "K", "N", "n", "groups", "splits", "first_token", "rank", "area", "top_k"),
        *("num_elements", "stride", "first", "tokens", "bias_stride", "mask_stride", "k"),
        *("vocab_size", "parents_stride"),
    ),
}
TYPES = {name: kind for kind, names in PARAMETERS.items() for name in names}
FILTERS_PER_ROW = {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}


def _dtype(name: str) -> dict[str, str]:
    return {**TYPES, "logits_ptr": f"*{name}", "weight_ptr": f"*{name}"}


Row = tuple[str, str, str, dict[str, str], dict[str, Any], int]
"""Family, name, kernel below `fsbench`, types, constants, warps."""


def _of_rows(capability: int) -> Iterator[Row]:
    """A program, or some, for each row of logits."""
    yield (
        *("akunu_faithful", "bf16", "kernels.providing.akunu.akunu_faithful_kernel"),
        *(_dtype("bf16"), {"BLOCK": akunu_faithful.TOKENS_AT_ONCE}, akunu_faithful.NUM_WARPS),
    )
    for dtype, each in (("bf16", False), ("bf16", True), ("fp32", False)):
        if dtype == "fp32" and capability != TUNED:
            continue
        types = _dtype(dtype) | (FILTERS_PER_ROW if each else {})
        words = f"{dtype} per row" if each else dtype
        wide = 16 // BYTES[dtype]
        constants = {"PER_ROW": each, "WIDE": wide, "TURNS": 64 // wide}
        exact = "kernels.providing.akunu.akunu_exact_kernel"
        yield "akunu_exact", words, exact, types, constants, akunu_exact.NUM_WARPS
        constants = {"PER_ROW": each, "BLOCK": pivot_search.TOKENS_AT_ONCE}
        search = "kernels.pivot_search.pivot_search_kernel"
        yield "pivot_search", words, search, types, constants, pivot_search.NUM_WARPS
    forms = [("bf16", False, True), ("bf16", False, False), ("bf16", True, False)]
    for dtype, greedy, keys in [*forms, ("fp32", False, False)]:
        words = " ".join([dtype, *["greedy"] * greedy, *["candidates"] * keys])
        constants = {"KEYS": keys, "GREEDY": greedy, "BLOCK": one_pass.TOKENS_AT_ONCE}
        of = "kernels.providing.one_pass.gumbel_argmax_kernel"
        yield "gumbel_argmax", words, of, _dtype(dtype), constants, one_pass.NUM_WARPS


def _of_parts(capability: int) -> Iterator[Row]:
    """Groups of tokens, candidates of ranks, masks, codes, and the weight."""
    groups, warps = "kernels.group_gumbel_parallel", group_gumbel_parallel.NUM_WARPS
    constants: dict[str, Any] = {"GROUP": group_gumbel_parallel.TOKENS_OF_GROUP}
    for dtype in ("bf16", "fp32"):
        of = f"{groups}.local_sample_kernel"
        yield "group_gumbel_parallel", f"{dtype} group", of, _dtype(dtype), constants, warps
    words, gather = "choice of a group", "kernels.flash_sampling_gather"
    of = f"{groups}.sample_group_kernel"
    yield "group_gumbel_parallel", words, of, TYPES, {"BLOCK": 256}, warps
    narrow = {**TYPES, "words_ptr": "*i32"}
    for family, name, function, types, block in (
        ("merge_keys", "", "kernels.shard.merge_keys.merge_keys_kernel", TYPES, MERGED),
        ("flash_sampling_gather", "pack", f"{gather}.pack_kernel", TYPES, GATHERED),
        ("flash_sampling_gather", "choose", f"{gather}.choose_rank_kernel", TYPES, GATHERED),
        ("follow_drafts", "", "kernels.fused.drafts.follow_drafts_kernel", TYPES, 8),
        ("pack_mask", "", "kernels.launch.operands.pack_mask_kernel", narrow, PACKED),
        ("noise_map", "", "kernels.noise.map.noise_map_kernel", TYPES, MAPPED),
    ):
        yield family, name, function, types, {"BLOCK": block}, 4
    for each in (False, True):
        types = {**TYPES, "temperature": "*fp32" if each else "fp32"}
        names = ("SEED_PER_ROW", "OFFSET_PER_ROW", "TEMPERATURE_PER_ROW")
        constants = {**dict.fromkeys(names, each), "BLOCK": DRAFTED}
        of = "kernels.drafting.launch.draft_noise_kernel"
        yield "draft_noise", "per row" if each else "", of, types, constants, 4
    warps, stages = weight_stream.NUM_WARPS, weight_stream.NUM_STAGES
    for dtype, size in BYTES.items():
        block = warps * 32 * weight_stream.LOAD_BYTES // size
        constants = {"LOADS": weight_stream.LOADS, "BLOCK": block, "NUM_STAGES": stages}
        of = "baselines.weight_stream.weight_stream_kernel"
        yield "weight_stream", dtype, of, _dtype(dtype), constants, warps
    for dtype in BYTES:
        for name, given, constants in (
            ("", {}, {"soft_cap": None, "bias_ptr": None, "mask_ptr": None, "WIDTH": 3}),
            (" everything, bools", {"mask_ptr": "*i1"}, {"WIDTH": 5}),
            (" everything, words", {"mask_ptr": "*i32"}, {"WIDTH": 5, "PACKED": True}),
        ):
            types = {**_dtype("fp32"), "bias_ptr": f"*{dtype}", "d_ptr": f"*{dtype}", **given}
            constants = {"PACKED": False, "BLOCK": SLOPES, **constants}
            of = "kernels.scoring.slopes.score_slopes_kernel"
            yield "score_slopes", dtype + name, of, types, constants, 4
    for ranks in (2, 4, 8):
        constants = {"RANKS": ranks, "WATCH": True, "BLOCK": flash_sampling_two_step.ROWS_AT_ONCE}
        of = "kernels.flash_sampling_two_step.exchange_kernel"
        yield "flash_sampling_two_step", f"{ranks} ranks", of, TYPES, constants, 4


def variants() -> Iterator[Variant]:
    """Every kernel for every compute capability; dtypes and numbers per row where it matters."""
    for capability in CAPABILITIES:
        for rows in (_of_rows, _of_parts):
            for family, name, path, types, constants, warps in rows(capability):
                function = kernel(*path.rsplit(".", 1))
                yield variant(family, name, function, types, constants, capability, num_warps=warps)
