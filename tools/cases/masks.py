"""Cases for `fsbench run`: the screened sampler under masks that forbid nearly all tokens.

    fsbench run --provider-path tools/cases/masks.py --provider screened_mask_tenth \
        --provider matmul_only --logits normal:3 --batch 1,16 --out OUT

Problems have no mask, so the check before timing cannot apply it. `build` compares the tokens of
STEPS steps with those of flash_sample, and raises if one differs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fsbench import inputs
from fsbench.errors import VerificationFailed
from fsbench.kernels import flash_sample, prepare_head, screened_sample
from fsbench.kernels.flash_sampling_screened import PROVIDER as SCREENED
from fsbench.kernels.launch.operands import pack_mask
from fsbench.kernels.providing.launches import CallLaunch
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

STEPS = 4


def build(problem: Problem, weight: Any, share: float) -> Launch:
    """Mask all but about this share of the tokens of each row."""
    generator = torch.Generator(problem.device).manual_seed(problem.B + problem.D)
    shape = (problem.B, problem.V)
    mask = torch.rand(shape, generator=generator, device=problem.device) < share
    options: dict[str, Any] = {"mask": pack_mask(mask), "noise": "token"}
    launch = CallLaunch(screened_sample, problem, prepare_head(weight), **options)
    expected = CallLaunch(flash_sample, problem, weight, **options)
    hidden = inputs.make_hidden(problem, 0)
    seed, offset = torch.ones(2, 1, dtype=torch.int64, device=problem.device)
    for step in range(STEPS):
        drawn = launch(hidden, seed, offset + step)
        reference_tokens = expected(hidden, seed, offset + step)
        if not drawn.equal(reference_tokens):
            row = int((drawn != reference_tokens).nonzero()[0])
            raise VerificationFailed(
                f"step {step}, row {row}: expected token {int(reference_tokens[row])} "
                f"(flash_sample), got {int(drawn[row])}"
            )
    return launch


PROVIDERS = tuple(
    Provider(
        name=f"screened_mask_{word}",
        label=f"Screened head, {share:.1%} of the tokens allowed",
        kind=Kind.LOWER_BOUND,
        requires=("triton",),
        capabilities=Capabilities(devices=("cuda", "cpu"), dtypes=("bf16", "fp16", "fp32")),
        build=partial(build, share=share),
        kept_bytes=SCREENED.kept_bytes,
        supports=SCREENED.supports,
    )
    for word, share in (("tenth", 0.1), ("thousandth", 0.001))
)
