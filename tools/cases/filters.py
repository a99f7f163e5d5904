"""A case for `fsbench run`: truncated_sample with filters as tensors, a number for each row.

    fsbench run --provider-path tools/cases/filters.py --provider topk_topp_tensors \
        --provider flash_sampling_topk_topp --top-p 0.9 --breakdown --out OUT

Every row has the problem's filters. Engines pass them so (vLLM's plug-in gives all three).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fsbench.kernels.flash_sampling_topk_topp import PROVIDER as NUMBERS
from fsbench.kernels.providing.truncated import TruncatedLaunch
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Launch


def build(problem: Problem, weight: Any) -> Launch:
    dtypes = (torch.int32, torch.float32, torch.float32)
    filters: dict[str, Any] = {
        name: torch.tensor(column, dtype=dtype, device=weight.device)
        for name, column, dtype in zip(
            FILTERS, zip(*problem.row_filters(), strict=True), dtypes, strict=True
        )
    }
    return TruncatedLaunch(problem, weight, **filters)


PROVIDERS = (
    replace(
        NUMBERS,
        name="topk_topp_tensors",
        label=f"{NUMBERS.label}, tensors of rows",
        build=build,
        call="",
        presets=(),
    ),
)
