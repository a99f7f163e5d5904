"""Penalties on stored logits, as leanly as plain torch has them: on the tokens seen alone.

Engines count tokens over the whole vocabulary in every step (vLLM's apply_penalties makes [B, V]
counts of prompt and output, then takes five passes over the logits). Here each row has a list of
its distinct tokens and of their counts, and a step gathers, changes and scatters these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from fsbench.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def penaliser(problem: Problem, device: torch.device) -> Callable[[Tensor], Tensor]:
    """logits [B, V] -> the same tensor, changed in place by the problem's penalties."""
    import torch

    if not problem.penalties:
        return lambda logits: logits
    rows = []
    for prompt, output in problem.row_histories():
        counts = Counter(output)
        rows.append({token: counts[token] for token in [*prompt, *output]})
    width = max(map(len, rows))
    # Rows are filled up with their first token: it is written several times, the same each time.
    ids = [[*row, *[next(iter(row))] * (width - len(row))] for row in rows]
    tokens = torch.tensor(ids, device=device)
    times = torch.tensor(
        [[row[token] for token in line] for row, line in zip(rows, ids, strict=True)],
        dtype=torch.float32,
    )
    less = problem.frequency_penalty * times + problem.presence_penalty * (times > 0)
    less = less.to(device)
    repetition = problem.repetition_penalty

    def penalise(logits: Tensor) -> Tensor:
        y = logits.gather(1, tokens).float()
        y = torch.where(y > 0, y / repetition, y * repetition) - less
        return logits.scatter_(1, tokens, y.to(logits.dtype))

    return penalise
