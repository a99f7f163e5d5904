"""Code that unfused samplers share: logits by one matmul, and operations on stored logits.

The matmul is the library's (cuBLAS on a GPU), as in `matmul_only`, so the cost of sampling is the
difference to that lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fsbench.problem import Problem
from fsbench.provider import Capabilities, Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Gather = Callable[["Tensor"], "Tensor"]
STORED = Capabilities(devices=("cuda", "cpu"), dtypes=("bf16", "fp16", "fp32"), host_sync_free=True)
"""Capabilities of samplers and scores in torch over stored logits."""

# The limits of the fast logarithm in torch's exponential: docs/design/exactness.md.
TORCH_NOISE = replace(STORED, exact_to_gap=10.0, excess_beyond_gap=0.2)
"""Capabilities of samplers with noise of torch's `exponential_` or `multinomial`."""


def matmul_logits(hidden: Tensor, weight: Tensor, V: int) -> Tensor:
    """Return logits [B, V] in the dtype of the inputs, accumulated in fp32.

    In bf16 the logits are rounded to 8 bits of mantissa; samplers that start with this function
    draw from the softmax of the rounded logits, as serving engines do.

    Args:
        hidden: [B, D].
        weight: [>= V, D], of fsbench.provider.padded; the logits of a padded weight are a view.
    """
    return (hidden @ weight.T)[:, :V]


def scaled_logits(
    hidden: Tensor, weight: Tensor, V: int, temperature: float, gather: Gather | None = None
) -> Tensor:
    """Return logits / temperature, fp32 [B, V], contiguous; cast before the division, as the paper.

    Args:
        gather: Gathers the logits of a sharded weight (`gathering`).
    """
    logits = matmul_logits(hidden, weight, V)
    if gather is not None:
        logits = gather(logits)
    return logits.float() / temperature


def float_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return fp32 logits [B, rows of weight] from the matmul's accumulator, not rounded.

    For samplers that read fp32: the matmul writes 4 bytes per logit; with a bf16 matmul and a cast
    it would be write 2, read 2, write 4. CUDA only (torch's `out_dtype`), bf16 or fp16 inputs.
    """
    import torch

    return torch.mm(hidden, weight.T, out_dtype=torch.float32)


def gathering(shard: Shard) -> Gather:
    """Return a function for eager or compiled code that gathers local logits [B, V_rank] to [B, V].

    As in serving engines: one all-gather, and one pass that joins the ranks' columns and that a
    compiler may fuse into the next operation. Every rank receives (n - 1) / n of 2 B V bytes in
    bf16. Smaller shards are padded for the collective.

    torch.distributed's functional collectives gather along a dimension other than 0 by a helper
    that torch.compile refuses under fullgraph (torch 2.11, pytorch issue 179722). The operators
    below them, with the permutation written out, do compile.
    """
    import torch
    import torch.distributed._functional_collectives

    sizes, name = list(shard.sizes), shard.group.group_name
    ranks, widest = len(sizes), max(sizes)

    def gather(logits: Tensor) -> Tensor:
        B = logits.shape[0]
        padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[1])).contiguous()
        stacked = torch.ops._c10d_functional.all_gather_into_tensor(padded, ranks, name)
        stacked = torch.ops._c10d_functional.wait_tensor(stacked).view(ranks, B, widest)
        if min(sizes) == widest:
            return stacked.permute(1, 0, 2).reshape(B, ranks * widest)
        return torch.cat([part[:, :size] for part, size in zip(stacked, sizes, strict=True)], 1)

    return gather


def penalizer(problem: Problem, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that applies the problem's penalties to logits [B, V] in place.

    Each row has a list of its distinct tokens and their counts; a step gathers, changes and
    scatters these logits only. Engines count tokens over the whole vocabulary in every step: vLLM's
    apply_penalties makes [B, V] counts of prompt and output, then five passes over the logits.
    """
    import torch

    if not problem.penalties:
        return lambda logits: logits
    rows = []
    for prompt, output in problem.row_histories():
        counts = Counter(output)
        rows.append({token: counts[token] for token in [*prompt, *output]})
    width = max(map(len, rows))
    # Shorter rows repeat their first token, which is then written several times, always the same.
    ids = [[*row, *[next(iter(row))] * (width - len(row))] for row in rows]
    tokens = torch.tensor(ids, device=device)
    times = torch.tensor(
        [[row[token] for token in line] for row, line in zip(rows, ids, strict=True)],
        dtype=torch.float32,
    )
    less = problem.frequency_penalty * times + problem.presence_penalty * (times > 0)
    less = less.to(device)
    repetition = problem.repetition_penalty

    def penalize(logits: Tensor) -> Tensor:
        y = logits.gather(1, tokens).float()
        y = torch.where(y > 0, y / repetition, y * repetition) - less
        return logits.scatter_(1, tokens, y.to(logits.dtype))

    return penalize


def row_targets(problem: Problem, device: torch.device) -> Tensor:
    """Return the problem's targets, int64 [B]."""
    import torch

    return torch.tensor(problem.row_targets(), device=device)


def target_logprob(
    hidden: Tensor, weight: Tensor, V: int, temperature: float, targets: Tensor
) -> Tensor:
    """Return log softmax(logits / T) at targets int64 [B]: fp32 [B]. weight: [>= V, D], padded."""
    logits = scaled_logits(hidden, weight, V, temperature)
    return logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
