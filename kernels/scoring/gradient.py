"""The gradient of `score`: cuBLAS products over chunks of rows and tokens.

With g, h and e the gradients of a row's log-probabilities, of its log Z and of its entropy H, p its
softmax, and y the logits after soft cap, bias and mask:

    d y[v] = (sum of g over targets v + (h - sum of all g - e (log p[v] + H)) p[v]) / T
    d x[v] = d y[v] (1 - tanh(x[v] / soft_cap)^2)

The logits of a chunk are computed again and overwritten by their gradient. No tensor is as large as
[B, V].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsbench import reference
from fsbench.kernels.checks.tensors import without_autocast
from fsbench.kernels.launch.request import Request
from fsbench.kernels.launch.result import Score

CHUNK = 2048
"""Rows, and tokens, of a chunk, at most. A chunk of fewer rows has more tokens."""
_WORKSPACE_BYTES = 60_000_000


class Gradients(NamedTuple):
    """Gradients of hidden [B, D], weight [>= V, D] and bias, in their dtypes, or None."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _Rows(NamedTuple):
    """Numbers of each row, fp32 [B, 1].

    inverse: 1 / T. logz: log Z. factor: (h - sum of all g) / T. entropy: H, and entropy_factor:
    e / T; or None.
    """

    inverse: Tensor
    logz: Tensor
    factor: Tensor
    entropy: Tensor | None
    entropy_factor: Tensor | None

    def part(self, rows: slice) -> _Rows:
        optional = (None if x is None else x[rows] for x in (self.entropy, self.entropy_factor))
        return _Rows(self.inverse[rows], self.logz[rows], self.factor[rows], *optional)


class DifferentiableScore(torch.autograd.Function):
    """Compute the fields of Score from (hidden, weight, bias, request, compute).

    compute: returns the Score of a request.
    """

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, request: Request,
                compute: Any) -> Score:  # fmt: skip
        # torch.func.grad may have wrapped the tensors of the request.
        score: Score = compute(request._replace(hidden=hidden, weight=weight, bias=bias))
        return score

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        hidden, weight, bias, request, _ = inputs
        score = Score(*output)
        ctx.save_for_backward(hidden, weight, bias, request.seed, score.logz, score.entropy)
        ctx.request = request._replace(hidden=None, weight=None, bias=None, seed=None)
        ctx.mark_non_differentiable(*(x for x in (score.valid, score.rank) if x is not None))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprob: Tensor, d_logz: Tensor, d_entropy: Tensor | None, *_: object
    ) -> tuple[Any, ...]:
        hidden, weight, bias, targets, logz, entropy = ctx.saved_tensors
        request = ctx.request._replace(hidden=hidden, weight=weight, bias=bias, seed=targets)
        pair = None if entropy is None or d_entropy is None else (entropy, d_entropy)
        needed = ctx.needs_input_grad[:3]
        return (*gradients(request, logz, d_logprob, d_logz, pair, needed), None, None)


@without_autocast
def gradients(
    request: Request,
    logz: Tensor,
    d_logprob: Tensor,
    d_logz: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
    needed: tuple[bool, bool, bool] = (True, True, False),
) -> Gradients:
    """Return the needed gradients of hidden, weight and bias.

    An ignored target, and a row without a log-probability (see Score.valid), has gradient 0.

    Args:
        request: of a score, with the targets [B, n] in seed.
        logz: fp32 [B], of the Score.
        d_logprob: fp32 [B, n].
        d_logz: fp32 [B].
        entropy: the entropy of the Score and its gradient, fp32 [B] each.
        needed: which of the three gradients to compute.
    """
    hidden, weight, bias, V = request.hidden, request.weight, request.bias, request.vocab_size
    (B, D), device = hidden.shape, hidden.device
    if B == 0:
        empty_bias = None if bias is None else torch.zeros_like(bias)
        return Gradients(torch.zeros_like(hidden), torch.zeros_like(weight), empty_bias)
    defined = logz.isfinite()[:, None]
    targets = request.seed
    inverse = reference.inverse_temperature(request.temperature, device).float().expand(B, 1)
    in_vocabulary = (targets >= 0) & (targets < V) & defined
    g = d_logprob.where(in_vocabulary, 0.0) * inverse.where(defined, 1.0)
    numbers = _Rows(
        inverse=inverse.where(defined, 1.0),
        logz=logz[:, None].where(defined, torch.inf),  # so that p is 0
        factor=(d_logz[:, None] * inverse - g.sum(1, keepdim=True)).where(defined, 0.0),
        entropy=None if entropy is None else entropy[0][:, None].where(defined, 0.0),
        entropy_factor=(
            None if entropy is None else (entropy[1][:, None] * inverse).where(defined, 0.0)
        ),
    )
    d_hidden = torch.empty_like(hidden) if needed[0] else None
    d_weight = torch.empty_like(weight) if needed[1] else None
    if d_weight is not None:
        d_weight[V:] = 0.0
    d_bias = None
    if needed[2] and bias is not None:
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=device)
    size = _chunk_size(D, _bytes_per_logit(request, entropy is not None))
    num_rows = min(size, B)
    num_tokens = size * size // num_rows // size * size
    shape = (num_rows, min(num_tokens, V))
    logits_buffer = torch.empty(shape, dtype=torch.float32, device=device)
    slopes_buffer = torch.empty(shape, dtype=hidden.dtype, device=device)
    sums_buffer = None
    if d_hidden is not None:
        sums_buffer = torch.empty(num_rows, D, dtype=torch.float32, device=device)
    for first_row in range(0, B, size):
        rows = slice(first_row, min(B, first_row + size))
        # A NaN in an undefined row would reach the gradient of the weight. d_hidden of these rows
        # is written last, so its memory holds the cleaned rows until then.
        h = torch.empty_like(hidden[rows]) if d_hidden is None else d_hidden[rows]
        h.copy_(hidden[rows]).masked_fill_(~defined[rows], 0.0)
        sums = None if sums_buffer is None else sums_buffer[: len(h)]
        row_numbers = numbers.part(rows)
        for first in range(0, V, num_tokens):
            tokens = slice(first, min(V, first + num_tokens))
            w = weight[tokens]
            logits, d = (x[: len(h), : len(w)] for x in (logits_buffer, slopes_buffer))
            _add_product(h, w.T, logits, True)
            chunk = _chunk(request, rows, tokens)
            d_y = _logits_to_slopes(logits, chunk, first, row_numbers, g[rows], d)
            if d_bias is not None and d_bias.ndim == 2:
                d_bias[rows, tokens] = d_y
            elif d_bias is not None:
                d_bias[tokens] += d_y.sum(0)
            if sums is not None:
                _add_product(d, w, sums, first == 0)
            if d_weight is not None:
                _add_product(d.T, h, d_weight[tokens], first_row == 0)
        if d_hidden is not None and sums is not None:
            d_hidden[rows] = sums.masked_fill_(~defined[rows], 0.0)
    if d_bias is not None and bias is not None:
        d_bias = d_bias.to(bias.dtype)
    return Gradients(d_hidden, d_weight, d_bias)


def _bytes_per_logit(request: Request, has_entropy: bool) -> int:
    """Return the bytes that a logit of a chunk needs, with the temporaries of _logits_to_slopes."""
    size = 4 + request.hidden.element_size()
    size += 4 if request.soft_cap is not None else 0
    mask = request.mask
    temporary = 4 if has_entropy else 0
    if mask is not None:
        temporary = max(temporary, 1 if mask.dtype == torch.bool else 5)
    return size + temporary


def _chunk_size(D: int, bytes_per_logit: int) -> int:
    """Return the rows, and tokens, of a chunk that fits the workspace: a multiple of 32."""
    # size^2 logits, and D fp32 sums for each row.
    size = math.isqrt((2 * D) ** 2 + bytes_per_logit * _WORKSPACE_BYTES) - 2 * D
    return min(CHUNK, max(32, size // bytes_per_logit // 128 * 128))


def _chunk(request: Request, rows: slice, tokens: slice) -> Request:
    """Return the request with targets, bias and mask of these rows and tokens only."""
    bias, mask = request.bias, request.mask
    if bias is not None:
        bias = bias[rows, tokens] if bias.ndim == 2 else bias[tokens]
    if mask is not None:
        tokens_per_word = 1 if mask.dtype == torch.bool else 32
        mask = mask[rows, tokens.start // tokens_per_word : -(-tokens.stop // tokens_per_word)]
    return request._replace(seed=request.seed[rows], bias=bias, mask=mask)


def _logits_to_slopes(
    logits: Tensor, chunk: Request, first: int, numbers: _Rows, g: Tensor, d: Tensor
) -> Tensor:
    """Write d x into d, and return d y in the memory of logits.

    Args:
        logits: fp32 [rows, tokens], x; overwritten.
        chunk: the request of these rows and tokens.
        first: the first token of the chunk.
        g: fp32 [rows, n], g / T; 0 for a target that does not count.
    """
    slope = None
    if chunk.soft_cap is not None:
        logits.div_(chunk.soft_cap).tanh_()
        slope = logits.square().neg_().add_(1.0).nan_to_num_(0.0)
        logits.mul_(chunk.soft_cap)
    if chunk.bias is not None:
        logits.add_(chunk.bias)
    if chunk.mask is not None:
        logits.masked_fill_(_forbidden(chunk.mask, logits.shape[1]), -torch.inf)
    logp = logits.mul_(numbers.inverse).sub_(numbers.logz)
    index = chunk.seed - first
    inside = (index >= 0) & (index < logits.shape[1])
    index = index.where(inside, 0)
    g = g.where(inside & logp.gather(1, index).isfinite(), 0.0)  # 0 for a forbidden target
    factor = numbers.factor
    if numbers.entropy is not None and numbers.entropy_factor is not None:
        factor = (logp + numbers.entropy).mul_(-numbers.entropy_factor).add_(factor)
    d_y = logp.exp_().mul_(factor).nan_to_num_(0.0, 0.0, 0.0)
    d_y.scatter_add_(1, index, g)
    if slope is None:
        d.copy_(d_y)
    else:
        d.copy_(slope.mul_(d_y))
    return d_y


def _forbidden(mask: Tensor, num_tokens: int) -> Tensor:
    """Return the tokens that a mask forbids, bool [rows, num_tokens]."""
    if mask.dtype == torch.bool:
        return ~mask
    bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits.bitwise_and_(1) == 0).flatten(1)[:, :num_tokens]


def _add_product(a: Tensor, b: Tensor, total: Tensor, first: bool) -> None:
    """Add a @ b to total, or write it there if `first`. On a GPU this is one launch.

    total: fp32, or of the dtype of a and b.
    """
    on_cpu = a.device.type == "cpu"
    if on_cpu or torch.compiler.is_compiling():  # the compiler has no addmm of two dtypes
        wide = on_cpu or a.dtype == torch.float32
        product = a.float() @ b.float() if wide else torch.mm(a, b, out_dtype=torch.float32)
        total.copy_(product if first else product.add_(total))
    elif a.dtype == total.dtype:
        total.addmm_(a, b, beta=int(not first))
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, beta=int(not first), out=total)
