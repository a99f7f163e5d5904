"""Calls that launch every kernel, on tensors without memory, for compile_kernels.py.

Every sampler of fsbench that needs Triton is built and launched, so a new sampler needs no change
of this file. The options of the public calls are added. Only public functions and the fields of
Provider are used, so that the calls also run on other commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from fsbench import kernels
from fsbench.discover import discover
from fsbench.kernels import (
    DraftVocabulary,
    Penalties,
    QuantizedHead,
    TokenHistory,
    VocabShard,
)
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.warming.absent_ranks import absent_ranks
from fsbench.kernels.warming.offline import CHIPS, DTYPES, Chip
from fsbench.problem import Problem
from fsbench.provider import Provider, Shard

CHIPS_OF: dict[str, Chip] = {
    "sm_90": CHIPS["h200"],
    "sm_80": CHIPS["a100"],
    "sm_100": CHIPS["b200"],
    "sm_89": Chip("NVIDIA L40S", (8, 9), 142, 101376, (2520000, 9001000, 384)),
    "sm_120": Chip("NVIDIA GeForce RTX 5090", (12, 0), 170, 101376, (2407000, 14001000, 512)),
    "gfx942": Chip("AMD Instinct MI300X", (9, 4), 304, 65536, (0, 0, 0), "gfx942"),
}
"""Architecture -> chip. For those in PLAIN_ONLY, only the plain portable kernel is compiled."""
PLAIN_ONLY = ("sm_89", "sm_120", "gfx942")
D, V = 4096, 151_936
BUCKETS = (16, 32, 64, 128, 192, 256)
"""Batch sizes that differ in tile shapes."""
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Call(NamedTuple):
    """A call that launches kernels. name: unique, and the same in every tree."""

    name: str
    run: Callable[[], object]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


whole = partial(zeros, dtype=torch.int64)
bf16 = partial(zeros, dtype=torch.bfloat16)


def step(rows: int = 1) -> dict[str, Any]:
    """Return seed and offset: one of each, or one per row."""
    return {"seed": whole(rows), "offset": whole(rows)}


def matrices(B: int, dtype: torch.dtype = torch.bfloat16, D: int = D, V: int = V) -> list[Any]:
    return [zeros(B, D, dtype=dtype), zeros(V, D, dtype=dtype)]


def quantized(form: str) -> QuantizedHead:
    return QuantizedHead(zeros(V, D, dtype=QUANTIZED[form]), zeros(V))


def per_row(B: int) -> dict[str, Any]:
    return {**step(B), "temperature": zeros(B)}


def changed(B: int) -> dict[str, Any]:
    """Return every option that changes logits."""
    mask = zeros(B, -(-V // 32), dtype=torch.int32)
    return {"soft_cap": 30.0, "bias": bf16(B, V), "mask": mask}


def options(B: int) -> dict[str, dict[str, Any]]:
    """Return the options of flash_sample, one by one and together."""
    scores = {"return_logprob": True, "return_logz": True}
    every = {**per_row(B), **changed(B), **scores}
    return {
        "logprob": {"return_logprob": True},
        "entropy": {"return_entropy": True},
        "rank": {"return_rank": True},
        "top 20": {"return_top": 20},
        "temperatures": {"temperature": zeros(B)},
        "token noise": {"noise": "token"},
        "2 samples": {"num_samples": 2},
        "everything": every,
        "everything, 2 samples": {**every, "num_samples": 2},
    }


def fused() -> Iterator[Call]:
    """Yield calls of flash_sample with its options, on both kernels."""
    for kernel in ("portable", "hopper"):
        for name in options(1):
            yield Call(f"{kernel} B=64 {name}", partial(_option, 64, name, kernel))
    for name in ("logprob", "temperatures", "everything"):
        yield Call(f"hopper B=256 {name}", partial(_option, 256, name, "hopper"))
    # Mixed blocks; three warpgroups and tiles of 256 tokens; those in paired blocks.
    for B, D_ in ((144, D), (160, D), (192, 8192), (320, D)):
        yield Call(f"hopper B={B} D={D_}", partial(_hopper, B, D_))
    yield Call("hopper B=192 D=8192 token noise", partial(_hopper, 192, 8192, noise="token"))
    yield Call("portable B=16 everything", partial(_option, 16, "everything", "portable"))
    yield Call("pointers B=64", partial(_flash, 64, torch.bfloat16, 4100))
    yield Call("float16 B=64", partial(_flash, 64, torch.float16, D))
    for form in QUANTIZED:
        for kernel, B in (("portable", 16), ("portable", 64), ("hopper", 64), ("hopper", 128)):
            yield Call(f"{kernel} B={B} {form}", partial(_bytes, B, form, kernel))
    yield Call("portable B=64 int8 bias", partial(_bytes, 64, "int8", "portable", bias=True))


def ranked() -> Iterator[Call]:
    """Yield calls of flash_sample on a shard, which exchange masses in addition to candidates."""
    for kernel in ("portable", "hopper"):
        yield Call(f"{kernel} B=64 logz, 2 ranks", partial(_masses_of_ranks, kernel))


def _masses_of_ranks(kernel: str) -> None:
    with absent_ranks(2) as group:
        shard = VocabShard(bf16(V // 512 * 256, D), group)
        kernels.flash_sample(bf16(64, D), shard, **step(), return_logz=True, kernel=kernel)


def _option(B: int, name: str, kernel: str) -> None:
    kernels.flash_sample(*matrices(B), **{**step(), **options(B)[name]}, kernel=kernel)


def _flash(B: int, dtype: torch.dtype, D: int) -> None:
    kernels.flash_sample(*matrices(B, dtype, D), **step())


def _hopper(B: int, D: int, noise: str = "group") -> None:
    kernels.flash_sample(*matrices(B, D=D), **step(), noise=noise, kernel="hopper")


def _bytes(B: int, form: str, kernel: str, bias: bool = False) -> None:
    arguments = {"bias": zeros(V)} if bias else {}
    kernels.flash_sample(bf16(B, D), quantized(form), **step(), **arguments, kernel=kernel)


def scores() -> Iterator[Call]:
    """Yield calls of `score` with its options."""
    every: dict[str, Any] = {"return_entropy": True, "return_rank": True}
    for B in (64, 256):
        yield Call(f"score B={B}", partial(_score, B))
    yield Call("score B=64 entropy", partial(_score, 64, return_entropy=True))
    yield Call("score B=64 everything", lambda: _score(64, 4, **{**every, **changed(64)}))
    yield Call("score B=64 int8", lambda: kernels.score(bf16(64, D), quantized("int8"), whole(64)))


def _score(B: int, targets: int = 1, **arguments: Any) -> None:
    hidden, weight = matrices(B)
    kernels.score(hidden, weight, whole(B, targets), **arguments)


def filtered() -> Iterator[Call]:
    """Yield calls of truncated_sample that keep few, many or unknown numbers of tokens."""
    kept: dict[str, Any] = {
        "return_logprob": True,
        "return_kept_logprob": True,
        "return_rank": True,
    }
    kept |= {"return_kept": True, "return_support": 64, "return_top": 20}
    cases: dict[str, Callable[[int], dict[str, Any]]] = {
        "k = 50": lambda B: {"top_k": 50},
        "k = 1000": lambda B: {"top_k": 1000, "top_p": 0.9},
        "p": lambda B: {"top_p": 0.9},
        "min-p, p": lambda B: {"min_p": 0.05, "top_p": 0.9},
        "rows": lambda B: {
            **per_row(B),
            "top_k": zeros(B, dtype=torch.int32),
            "top_p": zeros(B),
            "min_p": zeros(B),
        },
        "penalties": lambda B: {"top_k": 50, "penalties": _penalties(B)},
        "kept": lambda B: {"top_k": 50, "top_p": 0.9, **kept},
        "everything": lambda B: {**per_row(B), **changed(B), "top_p": 0.9, **kept},
    }
    for name, arguments in cases.items():
        yield Call(f"truncated B=64 {name}", partial(_truncated, 64, arguments))
    tiles = {"config": HopperConfig(2, 128, 64, 7, False)}  # an H100's, with stored logits
    for name in ("k = 50", "kept"):
        yield Call(f"truncated B=256 {name}", partial(_truncated, 256, cases[name], **tiles))


def _truncated(B: int, arguments: Callable[[int], dict[str, Any]], **more: Any) -> None:
    hidden, weight = matrices(B)
    kernels.truncated_sample(hidden, weight, **{**step(), **arguments(B), **more})


def _penalties(B: int) -> Penalties:
    return Penalties(TokenHistory(B, 1024, bf16(1).device), 1.1, 0.1, 0.1)


@cache
def screened_head(D: int = D, V: int = V) -> Any:
    return kernels.prepare_head(bf16(V, D))


def screened() -> Iterator[Call]:
    """Yield calls of screened_sample, by batch size and options, and under filters."""
    for B in (1, 16, 64, 128):
        yield Call(f"screened B={B}", partial(_screened, B))
    yield Call("screened B=16 D=1000", partial(_screened, 16, D=1000))
    yield Call("screened B=64 everything", partial(_screened_everything, 64))
    for B, D_ in ((4, 4096), (16, 4096), (8, 1000)):
        yield Call(f"filters from the screen B={B} D={D_}", partial(_from_screen, B, D_))
    yield Call(
        "filters from the screen B=8 everything",
        lambda: _from_screen(8, D, **per_row(8), **changed(8)),
    )


def _screened_everything(B: int) -> None:
    _screened(B, **per_row(B), **changed(B))


def _screened(B: int, D: int = D, **arguments: Any) -> None:
    kernels.screened_sample(bf16(B, D), screened_head(D), **{**step(), **arguments})


def _from_screen(B: int, D: int, **arguments: Any) -> None:
    kernels.truncated_sample(
        bf16(B, D), screened_head(D), **{**step(), **arguments}, top_k=20, top_p=0.95
    )


def drafts() -> Iterator[Call]:
    """Yield calls of draft steps and of their verification."""

    def drafted(**arguments: Any) -> None:
        # The check reads the ids, which have no memory.
        with mock.patch.object(DraftVocabulary, "__post_init__", lambda self: None, create=True):
            vocabulary = DraftVocabulary(whole(32_768), V)
        kernels.draft_sample(bf16(4, D), bf16(32_768, D), vocabulary, **{**step(), **arguments})

    yield Call("draft B=4", drafted)
    yield Call("draft B=4 rows", lambda: drafted(**per_row(4)))
    yield Call("verify", lambda: kernels.verify_drafts(whole(16), whole(4, 3)))
    yield Call("pack a mask", lambda: kernels.flash_sample(
        *matrices(4), mask=zeros(4, V, dtype=torch.bool), **step()))  # fmt: skip


def samplers() -> Iterator[Call]:
    """Yield launches of every sampler that needs Triton, as in `fsbench run`."""
    for name, entry in discover().items():
        provider = entry.provider
        if provider is None or provider.missing_packages() or not _on_gpu(provider):
            continue
        if name == "scaled_matmul":  # compiled by Inductor
            continue
        able = provider.capabilities
        cut: dict[str, Any] = {"top_k": 50, "top_p": 0.9} if able.filters else {}
        tuned = name in ("flash_sampling_hopper", "flash_sampling_token")
        for B in BUCKETS if tuned else (16,):
            problem = Problem(B, D, V, **cut)
            if provider.unsupported_reason(problem):
                continue
            yield Call(f"{name} B={B}", _launching(provider.build, problem))
            if provider.matmul_form and B == 64:
                form = _launching(provider.matmul_form, problem)
                yield Call(f"{name} B={B} matmul form", form)
        if able.mixed_filters:
            mixed = Problem(16, D, V, mixed=True, **cut)
            yield Call(f"{name} B=16 mixed", _launching(provider.build, mixed))
        if provider.build_sharded and name != "group_gumbel_distributed":
            for ranks in (2, 8):
                yield Call(f"{name} B=64 {ranks} ranks", partial(_launch_sharded, provider, ranks))
    noise = discover()["flash_sampling"].provider
    assert noise is not None and noise.noise_map is not None
    yield Call("noise map", lambda: noise.noise_map(whole(4096)))  # type: ignore[misc]


def _on_gpu(provider: Provider) -> bool:
    return "triton" in provider.requires and "cuda" in provider.capabilities.devices


def _launching(build: Any, problem: Problem) -> Callable[[], None]:
    return partial(launch_once, problem, partial(build, problem))


def launch_once(problem: Problem, build: Callable[[torch.Tensor], Any]) -> None:
    """Build a sampler, by a function weight -> launch, and launch it on zeros."""
    dtype = DTYPES[problem.dtype]
    launch = build(zeros(problem.V, problem.D, dtype=dtype))
    launch(zeros(problem.B, problem.D, dtype=dtype), whole(1), whole(1))


def _launch_sharded(provider: Provider, ranks: int) -> None:
    assert provider.build_sharded is not None
    sizes = (V // ranks // 256 * 256,) * ranks
    with absent_ranks(ranks) as group:
        shard = Shard(bf16(sizes[0], D), sizes, 0, group)
        launch = provider.build_sharded(Problem(64, D, sum(sizes), tp=ranks), shard)
        launch(bf16(64, D), whole(1), whole(1))


def plain() -> Iterator[Call]:
    """Yield calls of the portable kernel with every default tile shape."""
    for B in BUCKETS:
        yield Call(f"portable B={B} plain", partial(_portable, B))


def _portable(B: int) -> None:
    kernels.flash_sample(*matrices(B), **step(), kernel="portable")


def calls(architecture: str) -> list[Call]:
    """Return all calls for a GPU; unsupported ones raise when they are run."""
    parts = [plain] if architecture in PLAIN_ONLY else [
        plain, fused, ranked, scores, filtered, screened, drafts, samplers
    ]  # fmt: skip
    collected = [call for part in parts for call in part()]
    assert len({call.name for call in collected}) == len(collected), "two calls of one name"
    return collected
