"""Host code of the samplers of truncated problems over stored logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fsbench.problem import FILTERS, Problem
from fsbench.provider import Capabilities, Launch, padded

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fsbench.kernels.truncated.penalties import Penalties

AKUNU_ORDER = ("top_k", "top_p", "min_p", "temperature")
"""akunu's order of filters: they act at T = 1."""


STORED_LOGITS = Capabilities(
    noise="token",
    zero_temperature=True,
    host_sync_free=True,
    batch_invariant=True,
    filters=FILTERS,
    mixed_filters=True,
)
"""Capabilities of a draw from stored logits under filters, with noise of the contract."""


def filters_of(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Return top_k, top_p and min_p: numbers, or tensors [B] (int32, fp32, fp32) if mixed."""
    import torch

    if not problem.mixed:
        return {name: getattr(problem, name) for name in FILTERS}
    dtypes = (torch.int32, torch.float32, torch.float32)
    columns = zip(*problem.row_filters(), strict=True)
    return {
        name: torch.tensor(column, dtype=dtype, device=device)
        for name, column, dtype in zip(FILTERS, columns, dtypes, strict=True)
    }


def penalties_of(problem: Problem, device: torch.device) -> Penalties | None:
    """Return the problem's penalties with the history of its rows, or None."""
    from fsbench.kernels.truncated.penalties import Penalties, TokenHistory

    if not problem.penalties:
        return None
    prompts, outputs = zip(*problem.row_histories(), strict=True)
    history = TokenHistory.from_tokens(prompts, outputs, problem.history, device)
    return Penalties(
        history, problem.repetition_penalty, problem.presence_penalty, problem.frequency_penalty
    )


def draw_of_stored(draw: Callable[..., Tensor]) -> Callable[[Problem, Tensor], Launch]:
    """Return a Provider.build: cuBLAS, then `draw` with the problem's temperature and filters.

    Args:
        draw: Called as draw(logits [B, V], seed, offset, temperature, top_k=, top_p=, min_p=);
            returns tokens, int64 [B].
    """

    def build(problem: Problem, weight: Tensor) -> Launch:
        filters, temperature = filters_of(problem, weight.device), problem.temperature
        weight = padded(weight)

        def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
            logits = (hidden @ weight.T)[:, : problem.V]
            return draw(logits, seed, offset, temperature, **filters)

        return launch

    return build


def draw_rows(
    kernel: Any,
    logits: Tensor,
    seed: Tensor,
    offset: Tensor,
    temperature: float,
    scratch: Sequence[tuple[int, torch.dtype]],
    *,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    **meta: Any,
) -> Tensor:
    """Draw a token from each row of stored logits.

    Args:
        kernel: A kernel with a program for every row.
        logits: [B, V] with contiguous rows, bf16, fp16 or fp32.
        seed, offset: int64 [1].
        temperature: >= 0; 0 is greedy.
        scratch: Width and dtype of each buffer that the kernel needs for a row.
        top_k, top_p, min_p: Numbers, or all three tensors [B], int32, fp32 and fp32.

    Returns:
        int64 [B]; -1 for a row with a NaN or +inf logit or without a finite one.
    """
    import torch

    B, V = logits.shape
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    buffers = [torch.empty(B, width, dtype=dtype, device=logits.device) for width, dtype in scratch]
    launch_rows(
        kernel, B, logits.device,
        logits, *buffers, seed, offset, float(temperature), top_k, top_p, min_p, tokens,
        logits.stride(0), V, PER_ROW=isinstance(top_k, torch.Tensor), **meta,
    )  # fmt: skip
    return tokens


def launch_rows(kernel: Any, rows: int, device: torch.device, *arguments: Any, **meta: Any) -> None:
    """Launch a kernel with a program for every row, on the device of its tensors."""
    from fsbench.kernels.configs.gpu import bind_and_launch, launching_on

    with launching_on(device):
        bind_and_launch(kernel, (rows,), *arguments, **meta)
