"""What the samplers of truncated problems over stored logits share on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsbench.problem import FILTERS, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AKUNU_ORDER = ("top_k", "top_p", "min_p", "temperature")
"""akunu's order of filters: they act at T = 1."""


def filters_of(problem: Problem, device: torch.device) -> dict[str, int | float | Tensor]:
    """top_k, top_p and min_p: numbers, or in a mixed batch int32 and fp32 [B]."""
    import torch

    if not problem.mixed:
        return {name: getattr(problem, name) for name in FILTERS}
    kinds = (torch.int32, torch.float32, torch.float32)
    columns = zip(*problem.row_filters(), strict=True)
    return {
        name: torch.tensor(column, dtype=dtype, device=device)
        for name, column, dtype in zip(FILTERS, columns, kinds, strict=True)
    }


def launch_rows(kernel: Any, rows: int, device: torch.device, *arguments: Any, **meta: Any) -> None:
    """Launch a kernel with a program for every row, on the device of its tensors."""
    from fsbench.kernels._device import launching_on

    with launching_on(device):
        kernel[(rows,)](*arguments, **meta)
