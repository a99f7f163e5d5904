"""Variants of the fused kernels, portable and Hopper, and of the portable one without sampling."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from triton.experimental.gluon import language as gl

from fsbench.kernels.configs import tables
from fsbench.kernels.configs.hopper import CHUNK, MANY_ROWS, ONE_BYTE, ROWS, HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from kernel_variants.variant import CAPABILITIES, TUNED, Variant, kernel, variant

KIB = 1024
SHARED_LIMIT = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
SHARED_LIMIT |= {942: 64 * KIB}
"""Shared memory that one program may use, by compute capability; 942 is AMD's gfx942."""
NO_TMA = (80, 89, 942)
"""Where the matrices are loaded by pointers."""
PLAIN_ONLY = (89, 120, 942)
"""For which the plain variants alone are listed."""

OF_PATTERN = {"*H200*": (90,), "*H100*": (90,), "sm_90": (90,), "*": (80, 100, *PLAIN_ONLY)}
"""Compute capabilities of the GPUs that a pattern in the tables of tile shapes is for."""

PLAIN = {
    "seed_ptr": "*i64",
    "offset_ptr": "*i64",
    "temperature": "fp32",
    "keys_ptr": "*i64",
    "arrivals_ptr": "*i32",
    "tokens_ptr": "*i64",
    "valid_ptr": "*i1",
    **dict.fromkeys(("stride", "B", "V", "D", "mask_words", "samples", "first_sample"), "i32"),
    **dict.fromkeys(("first_token", "num_tokens", "rank", "area"), "i32"),
}
"""Types of the arguments that every launch has."""
OPTIONS = {
    "soft cap": {"soft_cap": "fp32"},
    "bias": {"bias_ptr": "*fp32"},
    "row bias": {"row_bias_ptr": "*bf16"},
    "mask": {"mask_ptr": "*i32"},
    "logprob": {"winners_ptr": "*fp32", "masses_ptr": "*i64", "logprob_ptr": "*fp32"},
    "logz": {"masses_ptr": "*i64", "logz_ptr": "*fp32"},
    "entropy": {"masses_ptr": "*i64", "entropy_ptr": "*fp32"},
    "rank": {"rank_ptr": "*i32", "limits_ptr": "*fp32"},
}
"""Types of the arguments that are None without an option."""
BYTES = ("i8", "fp8e4nv")
"""Types of weights of one byte."""
QUANTISED = {name: {"scale_ptr": "*fp32"} for name in ("scale", "scales")}
"""One for the whole weight, or one of each row."""
STORES = {"logits stored": {"logits_ptr": "*fp32"}, "largest stored": {"largest_ptr": "*fp32"}}
LINE = {"line": {"buffers_ptr": "*i64", "counts_ptr": "*i32"}}
PER_ROW = {
    "seeds": {"SEED_PER_ROW": True},
    "offsets": {"OFFSET_PER_ROW": True},
    "temperatures": {"TEMPERATURE_PER_ROW": True},
}
"""Constants of the options that are numbers of each row."""
SCORED = ("logprob", "logz")
"""What score asks for."""
OTHER_SIZES = ("group4", "group8", "group16")
"""Noise of other groups than those of 32 tokens."""
FULLY_SCORED = (*SCORED, "entropy", "rank")
"""What score can ask for."""
EVERYTHING = (*(option for option in OPTIONS if option not in FULLY_SCORED[2:]), *PER_ROW)
"""All options of a draw that stores no logits."""
FILTERED = (*(option for option in EVERYTHING if not option.startswith("log")), *STORES)
"""All options of a launch whose logits are filtered afterwards."""

PORTABLE = kernel("kernels.fused.portable", "flash_sampling_kernel")
HOPPER = kernel("kernels.fused.hopper.kernel", "hopper_kernel")
RANK = kernel("kernels.launch.ranks", "rank_kernel")
STANDING = kernel("kernels.launch.ranks", "standing_kernel")
TARGET_LOGITS = kernel("kernels.fused.portable", "target_logits_kernel")
MATMUL = kernel("kernels.providing.matmul_form", "matmul_form_kernel")


def _shipped() -> Iterator[tuple[str, int, Any, int]]:
    """(kernel, upper end of the bucket of B, config, capability) of the fused kernels' tables."""
    for path in sorted(Path(tables.__file__).with_name("tiles").glob("*.toml")):
        for row in tables.read(path):
            if row.kernel == "screened":  # kernel_variants.screened
                continue
            for capability in (90,) if row.kernel == "hopper" else OF_PATTERN[row.gpu]:
                yield row.kernel, row.bucket, row.config, capability


def _launch(
    given: Collection[str], noise: str, samples: int, ranks: int
) -> tuple[dict[str, str], dict[str, Any]]:
    """(types, constants) of a launch with the options that are `given`."""
    optional = {**OPTIONS, **STORES, **LINE, **QUANTISED}
    if ranks > 1:
        given = (*given, "line")
    types = {**PLAIN}
    absent: dict[str, Any] = {name: None for names in optional.values() for name in names}
    for option in given:
        for name, kind in optional.get(option, {}).items():
            types[name] = kind
            absent.pop(name, None)
    if "temperatures" in given:
        types["temperature"] = "*fp32"
    constants = {**absent, "N": samples, "NOISE": noise, "RANKS": ranks, "WATCH": ranks > 1}
    constants["SCALE_PER_ROW"] = "scales" in given
    for option, constant in PER_ROW.items():
        constants |= constant if option in given else dict.fromkeys(constant, False)
    return types, constants


def _tiles(config: TileConfig, use_tma: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_B": config.block_b,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "SLICE": config.slice,
        "V_ON_M": config.v_on_m,
        "USE_TMA": use_tma,
        "FLATTEN": config.flatten,
    }


def _matrices(config: TileConfig, dtype: str, use_tma: bool, weight: str = "") -> dict[str, str]:
    """weight: its dtype, if it is another than that of hidden."""
    shapes = {"hidden": (dtype, config.block_b), "weight": (weight or dtype, config.block_v)}
    return {
        name: f"tensordesc<{kind}[{rows}, {config.block_d}]>" if use_tma else f"*{kind}"
        for name, (kind, rows) in shapes.items()
    }


def _portable(
    config: TileConfig,
    capability: int,
    words: str = "",
    given: Collection[str] = (),
    dtype: str = "bf16",
    use_tma: bool | None = None,
    noise: str = "group",
    samples: int = 1,
    ranks: int = 1,
    weight: str = "",
) -> Variant:
    """A variant of the portable kernel. words: of its name, for what the rest does not say."""
    use_tma = capability not in NO_TMA if use_tma is None else use_tma
    types, constants = _launch(given, noise, samples, ranks)
    several = weight in BYTES and config.ctas_per_sm > 1
    return variant(
        "flash_sampling",
        " ".join([str(config), dtype, noise, words]).strip(),
        PORTABLE,
        types | _matrices(config, dtype, use_tma, weight),
        constants | _tiles(config, use_tma),
        capability,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"maxnreg": config.most_registers()} if several else {}),
    )


def _boxes(dtype: str, rows: int) -> str:
    """The type of a descriptor of boxes as wide as the widest swizzle."""
    bits = 8 if dtype in BYTES else 16
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    return f"tensordesc<{dtype}[{rows}, {CHUNK * 16 // bits}],{layout!r}>"


def _hopper(
    config: HopperConfig,
    B: int,
    words: str = "",
    given: Collection[str] = (),
    dtype: str = "bf16",
    noise: str = "group",
    samples: int = 1,
    ranks: int = 1,
    weight: str = "",
) -> Variant:
    """A variant of the Hopper kernel for B rows."""
    box_rows, boxes = config.boxes(B)
    types, constants = _launch(given, noise, samples, ranks)
    types |= {"hidden": _boxes(dtype, box_rows), "weight": _boxes(weight or dtype, 128)}
    constants |= {
        "WARPGROUPS": config.warpgroups,
        "PAIRED": config.paired,
        "BOXES": boxes,
        "BLOCK_V": config.block_v,
        "CONTIGUOUS": config.contiguous,
        "BLOCK_D": config.block_d,
        "STAGES": config.num_stages,
    }
    if config.split or config.one_byte:
        types["sums_ptr"] = "*fp32"
    else:
        constants["sums_ptr"] = None
    box = f"{boxes} x {box_rows} rows" if box_rows < ROWS // 2 else ""
    name = " ".join(filter(None, [str(config), dtype, noise, box, words]))
    return variant("flash_sampling_hopper", name, HOPPER, types, constants, 90, num_warps=4)


def _matmul(config: TileConfig, capability: int, use_tma: bool | None = None) -> Variant:
    use_tma = capability not in NO_TMA if use_tma is None else use_tma
    return variant(
        "matmul_form",
        f"{config} {'' if use_tma else 'pointers'}".strip(),
        MATMUL,
        {**_matrices(config, "bf16", use_tma), "largest_ptr": "*fp32"}
        | dict.fromkeys(("B", "V", "D"), "i32"),
        _tiles(config, use_tma),
        capability,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _many_options(config: TileConfig, capability: int, noise: str) -> Iterator[Variant]:
    """Everything at once, pointers and ranks, of one config of the portable kernel."""
    for samples in (1, 2):  # one is another path through the kernel than several
        words = f"everything, n = {samples}"
        yield _portable(config, capability, words, EVERYTHING, noise=noise, samples=samples)
    yield _portable(config, capability, "pointers", use_tma=False, noise=noise)
    for ranks in (2, 4, 8):
        yield _portable(config, capability, f"{ranks} ranks", ("logz",), noise=noise, ranks=ranks)


def _portable_variants(shipped: str, bucket: int, config: TileConfig, sm: int) -> Iterator[Variant]:
    tuned = sm == TUNED
    if shipped == "portable-token":
        if sm in PLAIN_ONLY:
            return
        for dtype in ("bf16", "fp16") if tuned else ("bf16",):
            yield _portable(config, sm, dtype=dtype, noise="token")
        if bucket in (64, 256) and tuned:
            yield _portable(config, sm, "everything, n = 1", EVERYTHING, noise="token")
        return
    yield _portable(config, sm)
    if sm in PLAIN_ONLY:
        return
    yield _matmul(config, sm)
    if tuned or bucket in (16, 64):
        yield _portable(config, sm, "score", SCORED, noise="given")
        yield _portable(config, sm, "score, all", FULLY_SCORED, noise="given")
        yield _portable(config, sm, dtype="fp16")
        yield _portable(config, sm, noise="none")
        yield _portable(config, sm, "stores", tuple(STORES))
        yield _portable(config, sm, "candidates with logz", ("logz",), ranks=0)
    if tuned and bucket in (16, 64):
        for noise in OTHER_SIZES:
            yield _portable(config, sm, noise=noise)
    if bucket == 64 or (tuned and bucket in (16, 256)):
        yield from _many_options(config, sm, "group")
        yield _matmul(config, sm, use_tma=False)
    if bucket == 64 and tuned:
        for option in EVERYTHING:
            yield _portable(config, sm, option, (option,))
        yield _portable(config, sm, "stores without largest", ("logits stored",))
        yield _portable(config, sm, "stores with everything", FILTERED)
        yield _portable(config, sm, "n = 4", samples=4)
        yield _portable(config, sm, "n = 4", noise="token", samples=4)
        yield _portable(config, sm, "candidates", ranks=0)
        yield _portable(config, sm, "score, n = 4", SCORED, noise="given", samples=4)
        yield _portable(config, sm, "score with entropy", (*SCORED, "entropy"), noise="given")
        yield _portable(config, sm, "score with rank", (*SCORED, "rank"), noise="given")


def _quantised_variants(config: TileConfig, sm: int) -> Iterator[Variant]:
    """Of weights of one byte."""
    for weight in BYTES if sm != 80 else BYTES[:1]:
        yield _portable(config, sm, weight, ("scales",), weight=weight)
    # Whatever is added to a scaled logit, and a config that somebody gives.
    if config.block_b == 64 and config.block_v == 128:
        given = (*EVERYTHING, "scales")
        yield _portable(config, sm, "i8 everything, n = 1", given, weight="i8")
        yield _portable(config, sm, "i8 bias", ("scales", "bias"), weight="i8")
        yield _portable(config, sm, "i8 pointers", ("scale",), use_tma=False, weight="i8")
        turned = replace(config, v_on_m=False, ctas_per_sm=1)
        yield _portable(turned, sm, "i8", ("scales",), weight="i8")


def _hopper_variants(bucket: int, config: HopperConfig) -> Iterator[Variant]:
    yield _hopper(config, bucket)
    yield _hopper(config, bucket, dtype="fp16")
    yield _hopper(config, bucket, noise="none")
    yield _hopper(config, bucket, "stores", tuple(STORES))
    yield _hopper(config, bucket, "candidates with logz", ("logz",), ranks=0)
    yield _hopper(config, bucket, "score", SCORED, noise="given")
    yield _hopper(config, bucket, "score, all", FULLY_SCORED, noise="given")
    yield _hopper(config, bucket, "everything, n = 1", EVERYTHING)
    for cut in config.cuts()[1:] if bucket == 256 else ():
        yield _hopper(cut, bucket)
        yield _hopper(cut, bucket, "temperatures", ("temperatures", "seeds"))
        yield _hopper(cut, bucket, "candidates with logz", ("logz",), ranks=0)
        yield _hopper(cut, bucket, "score, all", FULLY_SCORED, noise="given")
        yield _hopper(cut, bucket, "everything, n = 1", EVERYTHING)
    if bucket in (64, 256):
        for noise in ("token", *OTHER_SIZES):
            yield _hopper(config, bucket, noise=noise)
        yield _hopper(config, bucket, "everything, n = 1", EVERYTHING, noise="group8")
        yield _hopper(config, bucket, "everything, n = 2", EVERYTHING, samples=2)
        for ranks in (2, 4, 8) if bucket == 64 else (2,):
            yield _hopper(config, bucket, f"{ranks} ranks", ("logz",), ranks=ranks)
    if bucket == 64:
        for option in EVERYTHING:
            yield _hopper(config, bucket, option, (option,))
        for rows in (8, 32):  # fewer rows than a warpgroup has: the kernel was asked for
            yield _hopper(config, rows)
        split = replace(config, split=True)
        for rows in (8, 32, 64):
            yield _hopper(split, rows)
        yield _hopper(split, bucket, "score", SCORED, noise="given")
        yield _hopper(split, bucket, "everything, n = 1", EVERYTHING)
        yield _hopper(config, bucket, "stores without largest", ("logits stored",))
        yield _hopper(config, bucket, "stores with everything", FILTERED)
        yield _hopper(config, bucket, "n = 4", samples=4)
        yield _hopper(config, bucket, "candidates", ranks=0)
        yield _hopper(config, bucket, "score, n = 4", SCORED, noise="given", samples=4)
        yield _hopper(config, bucket, "score with entropy", (*SCORED, "entropy"), noise="given")
        yield _hopper(config, bucket, "score with rank", (*SCORED, "rank"), noise="given")


def _hopper_bytes() -> Iterator[Variant]:
    """Weights of one byte."""
    for weight in BYTES:
        for rows in (8, 16, 32, 64):
            yield _hopper(ONE_BYTE, rows, weight, ("scales",), weight=weight)
        given = (*EVERYTHING, "scales")
        yield _hopper(ONE_BYTE, 64, f"{weight} everything, n = 1", given, weight=weight)
        yield _hopper(ONE_BYTE, 64, f"{weight} n = 2", ("scale",), samples=2, weight=weight)
        given = (*SCORED, "scales")
        yield _hopper(ONE_BYTE, 64, f"{weight} score", given, noise="given", weight=weight)
        yield _hopper(ONE_BYTE, 64, weight, ("scales",), dtype="fp16", weight=weight)
        yield _hopper(MANY_ROWS, 128, weight, ("scales",), weight=weight)
    stored = (*STORES, "scales")
    yield _hopper(ONE_BYTE, 64, "i8 stores", stored, weight="i8")


def _target_logits() -> Iterator[Variant]:
    """The targets' logits, for ranks: plain, and with everything."""
    names = ("hidden_ptr", "weight_ptr", "targets_ptr", "limits_ptr", "rank_ptr")
    types = dict(zip(names, ("*bf16", "*bf16", "*i64", "*fp32", "*i32"), strict=True))
    types |= dict.fromkeys(("count", "V", "D", "mask_words", "samples"), "i32")
    optional = {name: kind for o in list(OPTIONS)[:4] for name, kind in OPTIONS[o].items()}
    scale = QUANTISED["scale"]
    scaled = {**optional, **scale, "weight_ptr": "*i8"}
    for name, given in (("plain", {}), ("everything", optional), ("everything, i8", scaled)):
        absent = [argument for argument in (*optional, *scale) if argument not in given]
        constants = {**dict.fromkeys(absent), "SCALE_PER_ROW": "weight_ptr" in given, "STEP": 64}
        for capability in CAPABILITIES:
            yield variant(
                "target_logits", name, TARGET_LOGITS, types | given, constants, capability,
                num_warps=4,
            )  # fmt: skip


def _standing() -> Iterator[Variant]:
    """Ranks and the largest logits, of small and of large vocabularies."""
    types = {"logits_ptr": "*fp32", "largest_ptr": "*fp32", "temperature": "fp32"}
    types |= {"tokens_ptr": "*i64", "valid_ptr": "*i1", "masses_ptr": "*i64"}
    types |= dict.fromkeys(("stride", "programs", "samples", "top"), "i32")
    rank = {"rank_ptr": "*i32", "counts_ptr": "*i64", "arrivals_ptr": "*i32"}
    for capability in CAPABILITIES:
        yield variant("rank", "", RANK, types | rank, {}, capability, num_warps=4)
    top = {"groups_ptr": "*i32", "keys_ptr": "*i64", "found_ptr": "*i32"}
    top |= {"top_tokens_ptr": "*i64", "top_logprob_ptr": "*fp32"}
    logprob = {"logprob_ptr": "*fp32"}
    both = {"top and logprob": top | logprob}
    for name, given in {"logprob": logprob, "top": top, **both}.items():
        constants: dict[str, Any] = dict.fromkeys(top | logprob)
        constants["TEMPERATURE_PER_ROW"] = False
        for argument in given:
            del constants[argument]
        for capability, groups in product(CAPABILITIES, (1024, 8192)):
            yield variant(
                "standing", f"{name}, {groups} groups", STANDING, types | given,
                constants | {"GROUPS": groups}, capability, num_warps=8,
            )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Of every config in the tables; those that nobody has tuned fitted to the shared memory."""
    yield from _target_logits()
    yield from _standing()
    yield from _hopper_bytes()
    for shipped, bucket, config, capability in _shipped():
        if shipped == "hopper":
            yield from _hopper_variants(bucket, config)
        else:
            limit = SHARED_LIMIT[capability] // config.ctas_per_sm - 1024
            if shipped == "portable-byte":
                if capability in CAPABILITIES:
                    yield from _quantised_variants(config.fitted(limit, 1), capability)
            else:
                yield from _portable_variants(shipped, bucket, config.fitted(limit, 2), capability)
