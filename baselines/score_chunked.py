"""Log-probabilities of given tokens with the logits of 1024 rows at a time, as in trainers.

    for each chunk of rows: the target's logit - logsumexp(logits)

Each chunk reads the weight again; up to 1024 rows there is one chunk.
"""

from __future__ import annotations

from fsbench.baselines.providing.logits import STORED, row_targets, scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded

ROWS = 1024  # of a chunk


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch

    weight, targets = padded(weight), row_targets(problem, weight.device)[:, None]

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logprob = torch.empty(problem.B, dtype=torch.float32, device=hidden.device)
        for first in range(0, problem.B, ROWS):
            rows = slice(first, first + ROWS)
            logits = scaled_logits(hidden[rows], weight, problem.V, problem.temperature)
            logprob[rows] = logits.gather(1, targets[rows])[:, 0] - logits.logsumexp(dim=1)
        return logprob

    return launch


PROVIDER = Provider(
    name="score_chunked",
    label="Chunked loss, 1024 rows",
    kind=Kind.SCORE,
    build=build,
    capabilities=STORED,
    presets=("score",),
)
