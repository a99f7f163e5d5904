"""What the samplers of truncated problems over stored logits share on the host."""

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
"""Of a draw from stored logits under filters, with noise of the contract."""


def filters_of(problem: Problem, device: torch.device) -> dict[str, Any]:
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


def penalties_of(problem: Problem, device: torch.device) -> Penalties | None:
    """The problem's penalties with the history of its rows; None if it has none."""
    from fsbench.kernels.truncated.penalties import Penalties, TokenHistory

    if not problem.penalties:
        return None
    prompts, outputs = zip(*problem.row_histories(), strict=True)
    history = TokenHistory.from_tokens(prompts, outputs, problem.history, device)
    return Penalties(
        history, problem.repetition_penalty, problem.presence_penalty, problem.frequency_penalty
    )


def draw_of_stored(draw: Callable[..., Tensor]) -> Callable[[Problem, Tensor], Launch]:
    """A provider's `build`: cuBLAS, then `draw` with the problem's temperature and filters.

    draw: (logits [B, V], seed, offset, temperature, top_k=, top_p=, min_p=) -> int64 [B], tokens.
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
    """Draw a token per row of stored logits [B, V] with contiguous rows, bf16, fp16 or fp32.

    Args:
        kernel: with a program for every row. scratch: width and dtype of what it needs of each row.
        seed, offset: int64 [1]. temperature: >= 0; 0 is greedy.
        top_k, top_p, min_p: numbers, or all three int32 and fp32 [B].

    Returns:
        int64 [B]; -1 for a row with a NaN or +inf logit or without a finite one.
    """
    import torch

    B, V = logits.shape
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    room = [torch.empty(B, width, dtype=dtype, device=logits.device) for width, dtype in scratch]
    launch_rows(
        kernel, B, logits.device,
        logits, *room, seed, offset, float(temperature), top_k, top_p, min_p, tokens,
        logits.stride(0), V, PER_ROW=isinstance(top_k, torch.Tensor), **meta,
    )  # fmt: skip
    return tokens


def launch_rows(kernel: Any, rows: int, device: torch.device, *arguments: Any, **meta: Any) -> None:
    """Launch a kernel with a program for every row, on the device of its tensors."""
    from fsbench.kernels.configs.gpu import bind_and_launch, launching_on

    with launching_on(device):
        bind_and_launch(kernel, (rows,), *arguments, **meta)
