"""Cases for `fsbench run`: heads and draws of draft steps, and a verify step.

    fsbench run --provider-path tools/cases/drafts.py --provider draft_reduced_sampled \
        --provider verify_token --provider greedy --logits normal:3 --batch 4 --out OUT

Drafts come from a quantized copy of the head or from REDUCED of its rows, so they do not follow the
problem's distribution, and these samplers are not checked before they are timed;
tests/kernels/drafting tests them. In draft_* every row of the problem is a request. In verify_* and
step_* every DRAFTS + 1 rows are one request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsbench.kernels import (
    draft_sample,
    flash_sample,
    prepare_draft_vocabulary,
    prepare_head,
    quantize_head,
    step_noise,
    verify_drafts,
)
from fsbench.kernels.providing.launches import CallLaunch
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

REDUCED = 32_768
DRAFTS = 3
ABLE = Capabilities(devices=("cuda", "cpu"), dtypes=("bf16", "fp16", "fp32"), zero_temperature=True)


def quantized(problem: Problem, weight: Tensor, dtype: torch.dtype, **options: Any) -> Launch:
    head = quantize_head(weight, dtype)
    return CallLaunch(flash_sample, problem, head, noise="token", **options)


def reduced(problem: Problem, weight: Tensor, screened: bool, **options: Any) -> Launch:
    generator = torch.Generator(weight.device).manual_seed(0)
    order = torch.randperm(problem.V, generator=generator, device=weight.device)
    ids = order[: min(REDUCED, problem.V)].contiguous()
    rows = weight[ids]
    call = partial(draft_sample, vocabulary=prepare_draft_vocabulary(ids, problem.V))
    return CallLaunch(call, problem, prepare_head(rows) if screened else rows, **options)


def of_requests(problem: Problem, weight: Tensor, noise: str, verify: bool) -> Launch:
    """Launch a step of B / (DRAFTS + 1) requests, without or with step_noise and verify_drafts."""
    requests, device = problem.B // (DRAFTS + 1), weight.device
    seeds, rows = (torch.arange(n, device=device) for n in (requests, problem.B))
    drafts = torch.zeros(requests, DRAFTS, dtype=torch.int64, device=device)
    draw = partial(flash_sample, temperature=problem.temperature, noise=noise)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        if not verify:
            return draw(hidden, weight, seed=rows, offset=rows).tokens
        row_seed, row_offset = step_noise(seeds, seeds, DRAFTS)
        drawn = draw(hidden, weight, seed=row_seed, offset=row_offset)
        return verify_drafts(drawn.tokens, drafts).tokens.flatten()

    return launch


def whole_requests(problem: Problem) -> str | None:
    if problem.B % (DRAFTS + 1):
        return f"takes {DRAFTS + 1} rows for each request, not {problem.B} rows"
    return None


def provider(name: str, build: Callable[..., Launch], **fields: Any) -> Provider:
    label = name.replace("_", " ")
    return Provider(name, label, Kind.LOWER_BOUND, build, ("triton",), capabilities=ABLE, **fields)


HEADS: dict[str, Callable[..., Launch]] = {
    "int8": partial(quantized, dtype=torch.int8),
    "fp8": partial(quantized, dtype=torch.float8_e4m3fn),
    "reduced": partial(reduced, screened=False),
    "reduced_screened": partial(reduced, screened=True),
}
PROVIDERS = (
    *(provider(f"draft_{name}_sampled", build) for name, build in HEADS.items()),
    *(
        provider(f"draft_{name}_greedy", partial(build, temperature=0.0))
        for name, build in HEADS.items()
    ),
    *(
        provider(
            f"{word}_{noise}",
            partial(of_requests, noise=noise, verify=verify),
            supports=whole_requests,
        )
        for word, verify in (("step", False), ("verify", True))
        for noise in ("token", "group")
    ),
)
