"""Cases for `fsbench run`: what `score` can return in addition, and losses that have gradients.

    fsbench run --provider-path tools/cases/score.py --provider gradient_chunked \
        --provider gradient_products --provider flash_score --batch 1024 --out OUT

`score` has no gradient; docs/guide/log-probabilities.md says which loss to combine with it.
gradient_chunked is what trainers do to save memory: cross_entropy of CHUNK rows at a time on fp32
logits, each chunk backward at once. gradient_liger is the fused forward and backward of
Liger-Kernel (baselines/score_liger.py). gradient_products is the lower bound: the product of hidden
and weight, and the two products that the gradients need. These keep gradients of hidden and weight
and are timed eagerly. The column peak_extra_bytes has the gradients, too: 2 (B + V) D bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fsbench.baselines import score_liger
from fsbench.kernels import score
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

TARGETS = 4
CHUNK = 1024
ABLE = Capabilities(devices=("cuda", "cpu"), dtypes=("bf16", "fp16", "fp32"), fused=True)
EAGER = Capabilities(devices=("cuda", "cpu"), dtypes=("bf16", "fp16", "fp32"), graph_safe=False)
LIGER = Capabilities(dtypes=("bf16",), graph_safe=False)


def scored(problem: Problem, weight: Tensor, targets: int = 1, **options: Any) -> Launch:
    """Launch `score` with `targets` copies of the problem's target in each row."""
    first = torch.tensor(problem.row_targets(), device=weight.device)
    every = first if targets == 1 else first[:, None].repeat(1, targets)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logprob = score(hidden, weight, every, temperature=problem.temperature, **options).logprob
        return logprob if targets == 1 else logprob[:, 0].contiguous()

    return launch


def with_gradients(step: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> Any:
    """Return a `build` for a step on leaves that share the memory of hidden and weight."""

    def build(problem: Problem, weight: Tensor) -> Launch:
        targets = torch.tensor(problem.row_targets(), device=weight.device)

        def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
            leaves = (hidden.detach().requires_grad_(), weight.detach().requires_grad_())
            return step(*leaves, targets, problem.temperature).detach()

        return launch

    return build


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    losses = []
    for rows, row_targets in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
        logits = (rows @ weight.T).float() / temperature
        loss = cross_entropy(logits, row_targets, reduction="none")
        loss.sum().backward()
        losses.append(-loss.detach())
    return torch.cat(losses)


def fused_by_liger(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    loss = score_liger.fused_loss()(hidden, weight, targets, temperature)
    loss.backward(torch.ones_like(loss))
    return -loss


def products(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    with torch.no_grad():
        d = hidden @ weight.T
        d @ weight
        return d.T @ hidden


def provider(name: str, build: Any, able: Capabilities, kind: Kind = Kind.SCORE) -> Provider:
    label = name.replace("_", ", ", 1).replace("_", " ")
    return Provider(name, label, kind, build, ("triton",), capabilities=able)


PROVIDERS = (
    provider("score_entropy", lambda p, w: scored(p, w, return_entropy=True), ABLE),
    provider("score_rank", lambda p, w: scored(p, w, return_rank=True), ABLE),
    provider("score_targets", lambda p, w: scored(p, w, targets=TARGETS), ABLE),
    provider("gradient_chunked", with_gradients(chunked), EAGER),
    replace(
        provider("gradient_liger", with_gradients(fused_by_liger), LIGER),
        requires=("liger_kernel", "cutlass"),
    ),
    provider("gradient_products", with_gradients(products), EAGER, Kind.LOWER_BOUND),
)
