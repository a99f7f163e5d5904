"""What every unfused sampler shares: logits by one matmul, then what is done to stored logits.

The matmul is the library's (cuBLAS on a GPU): the one kernel all competitors share with
`matmul_only`, so what they add to that floor is the cost of sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from fsbench.problem import Problem
from fsbench.provider import Capabilities, Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Gather = Callable[["Tensor"], "Tensor"]
STORED = Capabilities(devices=("cuda", "cpu"), dtypes=("bf16", "fp16", "fp32"), host_sync_free=True)
"""Of a score from stored logits."""


def matmul_logits(hidden: Tensor, weight: Tensor, V: int) -> Tensor:
    """hidden [B, D] x weight [>= V, D] -> logits [B, V] in their dtype, accumulated in fp32.

    weight: fsbench.provider.padded. Of a padded one the logits are a view.

    In bf16 the logits are rounded to 8 bits of mantissa: every sampler that starts here draws from
    the softmax of the rounded logits, as serving engines do.
    """
    return (hidden @ weight.T)[:, :V]


def scaled_logits(
    hidden: Tensor, weight: Tensor, V: int, temperature: float, gather: Gather | None = None
) -> Tensor:
    """[B, V] fp32 logits / temperature, contiguous; cast before the division, as the paper does.

    gather: brings the logits of a sharded weight together (`gathering`).
    """
    logits = matmul_logits(hidden, weight, V)
    if gather is not None:
        logits = gather(logits)
    return logits.float() / temperature


def float_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[B, rows of weight] fp32 logits straight from the matmul: its accumulator, unrounded.

    For samplers that read fp32: writing it at once (4 bytes per logit) replaces write 2, read 2,
    write 4 of a bf16 matmul and a cast. CUDA only (torch's `out_dtype`), bf16 or fp16 inputs.
    """
    import torch

    return torch.mm(hidden, weight.T, out_dtype=torch.float32)


def gathering(shard: Shard) -> Gather:
    """A function for eager or compiled code: local logits [B, V_rank] -> [B, V] on every rank.

    Serving engines bring the logits of a sharded head together so: one all-gather, in which every
    rank receives (n - 1) / n of 2 B V bytes in bf16, and one pass that puts the ranks' columns side
    by side, which a compiler may fuse into what follows. Shards that are smaller than the largest
    are padded for the collective.

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
    """Return a function that changes logits [B, V] in place by the problem's penalties.

    It touches the tokens seen alone, as leanly as plain torch can. Engines count tokens over the
    whole vocabulary in every step (vLLM's apply_penalties makes [B, V] counts of prompt and output,
    then takes five passes over the logits). Here each row has a list of its distinct tokens and of
    their counts, and a step gathers, changes and scatters these.
    """
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

    def penalize(logits: Tensor) -> Tensor:
        y = logits.gather(1, tokens).float()
        y = torch.where(y > 0, y / repetition, y * repetition) - less
        return logits.scatter_(1, tokens, y.to(logits.dtype))

    return penalize


def row_targets(problem: Problem, device: torch.device) -> Tensor:
    """int64 [B]: the problem's targets."""
    import torch

    return torch.tensor(problem.row_targets(), device=device)


def target_logprob(
    hidden: Tensor, weight: Tensor, V: int, temperature: float, targets: Tensor
) -> Tensor:
    """log softmax(logits / T) at targets int64 [B], fp32 [B]. weight: padded, [>= V, D]."""
    logits = scaled_logits(hidden, weight, V, temperature)
    return logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
