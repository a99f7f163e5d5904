"""`flash_sample` on CPU tensors through fsbench.reference, which draws the same tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fsbench import reference
from fsbench.kernels.checks.tensors import without_autocast
from fsbench.kernels.launch.request import Request, raw_logits
from fsbench.kernels.launch.result import Sample
from fsbench.kernels.shard.vocab_shard import VocabShard, pack


@torch.no_grad()
@without_autocast
def compute(request: Request, out: Sample) -> None:
    """Run a request on logits that are summed in fp32, and write the results to `out`."""
    n, temperature, shard = request.num_samples, request.temperature, request.shard
    logits = reference.processed_logits(
        raw_logits(request), soft_cap=request.soft_cap, bias=request.bias, mask=request.mask
    )
    if shard is not None:
        # This rank has no logits of other ranks' tokens.
        logits[:, : shard.first_token] = -torch.inf
        logits[:, shard.first_token + shard.num_tokens :] = -torch.inf
    step = request.steps()
    logz = reference.log_partition(logits, temperature)
    merging = shard if not request.merge_later else None
    if merging is not None:
        logz = merging.gather(logz).logsumexp(0)
    if request.noise == "target":
        _score(request, logits, logz, out)
        return
    for sample in range(n):
        tokens, _, scores = reference.expect(
            logits,
            request.seed,
            step,
            temperature,
            request.noise,
            sample=sample,
            find_acceptable=False,
        )
        value = logits.gather(1, tokens.clamp_min(0)[:, None]).double()
        value = (value * reference.inverse_temperature(temperature, logits.device))[:, 0]
        if merging is not None:
            tokens, value = merging.best_of_ranks(tokens, scores, value)
        values = pack(scores, tokens) if request.merge_later else tokens
        out.tokens.view(-1, n)[:, sample] = values
        out.valid.copy_(tokens >= 0)
        if out.logprob is not None:
            out.logprob.view(-1, n)[:, sample] = torch.where(out.valid, value - logz, torch.nan)
        if out.rank is not None:
            y = logits.gather(1, tokens.clamp_min(0)[:, None])
            out.rank.view(-1, n)[:, sample] = _ranks(logits, y)[:, 0].where(out.valid, -1)
    if out.entropy is not None:
        entropy = _entropy(logits, temperature, logz, merging)
        out.entropy.copy_(entropy.where(out.valid, torch.nan))
    if out.top_tokens is not None and out.top_logprob is not None:
        tokens, top_logprob = reference.largest(logits, out.top_tokens.shape[1], temperature)
        out.top_tokens.copy_(tokens.where(out.valid[:, None], -1))
        out.top_logprob.copy_(top_logprob.where(out.valid[:, None], torch.nan))
    if out.logz is not None:
        out.logz.copy_(torch.where(out.valid, logz, torch.nan))


def _score(request: Request, logits: Tensor, logz: Tensor, out: Sample) -> None:
    """Score the targets in request.seed.

    logits: fp32 [B, V]. logz: float64 [B], over all ranks.
    """
    shard, targets = request.shard, request.seed
    T = reference.as_column(request.temperature, logits.device)[:, 0]
    defined = logz.isfinite() & (T >= 0) & (torch.inf > T)
    inside = (targets >= 0) & (targets < request.vocab_size)
    value = logits.double().gather(1, targets.where(inside, 0))
    if shard is not None:
        value = shard.gather(value.contiguous()).amax(0)  # -inf on all ranks but the target's
    value *= reference.inverse_temperature(request.temperature, logits.device)
    ignored = targets == -100
    good = inside & defined[:, None]
    logprob = (value - logz[:, None]).where(good, torch.nan).masked_fill(ignored, 0.0)
    assert out.logprob is not None and out.logz is not None
    out.logprob.copy_(logprob)
    out.logz.copy_(logz.where(defined, torch.nan))
    out.valid.copy_(good | ignored)
    if out.rank is not None:
        y = logits.gather(1, targets.where(inside, 0))
        out.rank.copy_(_ranks(logits, y).where(good, -1))
    if out.entropy is not None:
        entropy = _entropy(logits, request.temperature, logz, shard)
        out.entropy.copy_(entropy.where(defined, torch.nan))


def _ranks(logits: Tensor, y: Tensor) -> Tensor:
    """Count the logits [B, V] above each of y [B, n]; int64 [B, n]."""
    return torch.stack([(logits > each[:, None]).sum(1) for each in y.T], 1)


def _entropy(
    logits: Tensor, temperature: float | Tensor, logz: Tensor, shard: VocabShard | None
) -> Tensor:
    """Return the entropy of softmax(logits / T), float64 [B]; logz: float64 [B], over all ranks."""
    x = logits.double() * reference.inverse_temperature(temperature, logits.device) - logz[:, None]
    entropy = -(x.exp() * x).masked_fill(x == -torch.inf, 0.0).sum(1)
    return entropy if shard is None else shard.gather(entropy).sum(0)
