"""Cases for `fsbench run`: flash_sample with each of its options, next to plain sampling.

    fsbench run --provider-path tools/cases/options.py --provider option_plain \
        --provider option_bias_rows_fp32 --batch 1,16 --out OUT

Biases are zeros, masks allow every token and row temperatures are the problem's, so that tokens are
those of the problem's distribution and the check before timing applies to them. The kernels read as
many bytes as with other values. Host time of an eager call is in the column host_us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsbench.kernels import flash_sample
from fsbench.kernels.launch.operands import pack_mask
from fsbench.kernels.providing.launches import CallLaunch
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

Options = Callable[[Problem], dict[str, Any]]


def full(problem: Problem, value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.full(shape, value, dtype=dtype, device=problem.device)


def allowed(p: Problem) -> Any:
    return full(p, True, p.B, p.V, dtype=torch.bool)


SAME_TOKENS: dict[str, Options] = {
    "plain": lambda p: {},
    "temperature_rows": lambda p: {"temperature": full(p, p.temperature, p.B)},
    "bias": lambda p: {"bias": full(p, 0, p.V)},
    "bias_rows_fp32": lambda p: {"bias": full(p, 0, p.B, p.V)},
    "bias_rows_bf16": lambda p: {"bias": full(p, 0, p.B, p.V, dtype=torch.bfloat16)},
    "mask_bool": lambda p: {"mask": allowed(p)},
    "mask_packed": lambda p: {"mask": pack_mask(allowed(p))},
    "logz": lambda p: {"return_logz": True},
    "logprob": lambda p: {"return_logprob": True},
    "entropy": lambda p: {"return_entropy": True},
    "rank": lambda p: {"return_rank": True},
    "top_20": lambda p: {"return_top": 20},
    "logprob_rank_top_20": lambda p: {
        "return_logprob": True,
        "return_rank": True,
        "return_top": 20,
    },
}
"""Options that do not change the token of a plain call with the same seed and offset."""

SEEDS_OF_ROWS: dict[str, Options] = {
    "seed_rows": lambda p: {"seed": torch.arange(p.B, device=p.device)},
    "seed_temperature_rows_logprob": lambda p: {
        "seed": torch.arange(p.B, device=p.device),
        "temperature": full(p, p.temperature, p.B),
        "return_logprob": True,
    },
}
"""Options that replace the step's seed, so that no check applies to the tokens."""

SAME_DISTRIBUTION: dict[str, Options] = {
    "soft_cap": lambda p: {"soft_cap": 1e5},
    "vocab_size": lambda p: {"vocab_size": p.V - (77 if p.V > 100_000 else 0)},
    "samples_2": lambda p: {"num_samples": 2},
    "samples_8": lambda p: {"num_samples": 8},
}
"""Options that give another draw from the problem's distribution, or nearly so."""


def provider(name: str, options: Options, kind: Kind = Kind.EXACT, **able: Any) -> Provider:
    def build(problem: Problem, weight: Any) -> Launch:
        return CallLaunch(flash_sample, problem, weight, **options(problem))

    capabilities = Capabilities(
        devices=("cuda", "cpu"), dtypes=("bf16", "fp16", "fp32"), zero_temperature=True,
        fused=True, host_sync_free=True, **able,
    )  # fmt: skip
    label = f"flash_sample, {name.replace('_', ' ')}"
    return Provider(f"option_{name}", label, kind, build, ("triton",), capabilities=capabilities)


PROVIDERS = (
    *(provider(name, options, noise="group") for name, options in SAME_TOKENS.items()),
    provider("token_noise", lambda p: {"noise": "token"}, noise="token"),
    provider(
        "token_noise_logprob",
        lambda p: {"noise": "token", "return_logprob": True},
        noise="token",
    ),
    *(provider(name, options) for name, options in SAME_DISTRIBUTION.items()),
    *(provider(name, options, Kind.LOWER_BOUND) for name, options in SEEDS_OF_ROWS.items()),
    provider("greedy", lambda p: {"temperature": 0.0}, Kind.GREEDY),
    provider("greedy_rows", lambda p: {"temperature": full(p, 0, p.B)}, Kind.GREEDY),
)
