"""The gradient of score: logits are computed again, a chunk of rows and tokens at a time.

With g, h and e the gradients of a row's log-probabilities, of its log Z and of its entropy H, p its
softmax, and y the logits after soft cap, bias and mask:

    d y[v] = (sum of g over targets v + (h - sum of all g - e (log p[v] + H)) p[v]) / T

Chunks are plain matrix products of torch. No tensor is as large as [B, V].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsbench import reference
from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Score

AT_ONCE = 1024
"""Rows, and tokens, of a chunk; fewer where D is above 4096. 64 MB hold all that a chunk needs."""
_NUMBERS = 1024 * 4096


class Gradients(NamedTuple):
    """Of hidden [B, D], weight [>= V, D] and bias, in their dtypes; None for one not asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class DifferentiableScore(torch.autograd.Function):
    """(hidden, weight, bias, request, carry_out) -> the fields of Score.

    carry_out: computes them for the request, whose tensors hidden, weight and bias are.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, request: Request,
                carry_out: Any) -> Score:  # fmt: skip
        found: Score = carry_out(request)
        ctx.save_for_backward(hidden, weight, bias, request.seed, found.logz, found.entropy)
        ctx.request = request
        ctx.mark_non_differentiable(*(x for x in (found.valid, found.rank) if x is not None))
        return found

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprob: Tensor, d_logz: Tensor, d_entropy: Tensor | None, *_: object
    ) -> tuple[Any, ...]:
        hidden, weight, bias, targets, logz, entropy = ctx.saved_tensors
        request = ctx.request._replace(hidden=hidden, weight=weight, bias=bias, seed=targets)
        of_entropy = None if entropy is None or d_entropy is None else (entropy, d_entropy)
        wanted = ctx.needs_input_grad[:3]
        found = gradients(request, logz, d_logprob, d_logz, of_entropy, wanted)
        return (*found, None, None)


def gradients(
    request: Request,
    logz: Tensor,
    d_logprob: Tensor,
    d_logz: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None = None,
    wanted: tuple[bool, bool, bool] = (True, True, False),
) -> Gradients:
    """The gradients of hidden, weight and bias that are wanted.

    What has no log-probability (see Score.valid), and what is ignored, has a gradient of 0.

    Args:
        request: of a score, the targets [B, n] in seed. logz: fp32 [B], of Score.
        d_logprob: fp32 [B, n]. d_logz: fp32 [B].
        of_entropy: the entropy of Score, fp32 [B], and its gradient; or None.
    """
    hidden, weight, bias, V = request.hidden, request.weight, request.bias, request.vocab_size
    (B, D), device = hidden.shape, hidden.device
    defined = logz.isfinite()[:, None]
    counts = (request.seed >= 0) & (request.seed < V) & defined
    inverse = reference.inverse_temperature(request.temperature, device).float().expand(B, 1)
    g = d_logprob.where(counts, 0.0) * inverse
    of_softmax = (d_logz[:, None] * inverse - g.sum(1, keepdim=True)).where(defined, 0.0)
    logz = logz[:, None].where(defined, 0.0)
    if of_entropy is not None:
        entropy, d_entropy = (x[:, None].where(defined, 0.0) for x in of_entropy)
        d_entropy = d_entropy * inverse

    d_hidden = torch.zeros_like(hidden) if wanted[0] else None
    d_weight = torch.zeros_like(weight) if wanted[1] else None
    d_bias = None
    if wanted[2] and bias is not None:
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=device)
    size = min(AT_ONCE, max(32, _NUMBERS // D // 32 * 32))
    for first_row in range(0, B, size):
        rows = slice(first_row, min(B, first_row + size))
        # A NaN times 0 would reach the gradient of the weight.
        h = hidden[rows].where(defined[rows], 0.0)
        of_rows = None
        if d_hidden is not None:
            of_rows = torch.zeros(h.shape, dtype=torch.float32, device=device)
        for first in range(0, V, size):
            tokens = slice(first, min(V, first + size))
            w = weight[tokens]
            logits = _product(h, w.T)
            slope = None
            if request.soft_cap is not None:
                logits = logits.div_(request.soft_cap).tanh_()
                slope = 1.0 - logits * logits
                logits *= request.soft_cap
            _process(logits, request, rows, tokens)
            forbidden = logits == -torch.inf
            d = logits.mul_(inverse[rows]).sub_(logz[rows])
            if of_entropy is None:
                d = d.exp_().mul_(of_softmax[rows])
            else:
                factor = (d + entropy[rows]).mul_(-d_entropy[rows]).add_(of_softmax[rows])
                d = d.exp_().mul_(factor)
            here = request.seed[rows] - first
            inside = (here >= 0) & (here < d.shape[1])
            d.scatter_add_(1, here.where(inside, 0), g[rows].where(inside, 0.0))
            d.masked_fill_(forbidden | ~defined[rows], 0.0)
            if d_bias is not None:
                if d_bias.ndim == 2:
                    d_bias[rows, tokens] = d
                else:
                    d_bias[tokens] += d.sum(0)
            if slope is not None:
                d *= slope
            d = d.to(hidden.dtype)
            if of_rows is not None:
                of_rows += _product(d, w)
            if d_weight is not None:
                d_weight[tokens] += _product(d.T, h)
        if d_hidden is not None and of_rows is not None:
            d_hidden[rows] = of_rows.masked_fill_(~defined[rows], 0.0).to(hidden.dtype)
    if d_bias is not None and bias is not None:
        d_bias = d_bias.to(bias.dtype)
    return Gradients(d_hidden, d_weight, d_bias)


def _process(logits: Tensor, request: Request, rows: slice, tokens: slice) -> None:
    """Bias and mask of a chunk, in place."""
    bias, mask = request.bias, request.mask
    if bias is not None:
        logits += bias[rows, tokens] if bias.ndim == 2 else bias[tokens]
    if mask is not None:
        if mask.dtype == torch.bool:
            allowed = mask[rows, tokens]
        else:
            words = mask[rows, tokens.start // 32 : -(-tokens.stop // 32)]
            allowed = reference.unpacked(words, logits.shape[1])
        logits.masked_fill_(~allowed, -torch.inf)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32, of any dtype."""
    if a.dtype == torch.float32:
        return a @ b
    if a.device.type == "cpu":
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)
