"""The gradient of score: logits are computed again, a chunk of rows and tokens at a time.

With g, h and e the gradients of a row's log-probabilities, of its log Z and of its entropy H, p its
softmax, and y the logits after soft cap, bias and mask:

    d y[v] = (sum of g over targets v + (h - sum of all g - e (log p[v] + H)) p[v]) / T

Chunks are plain matrix products of torch. What is between them is one kernel on a GPU, and torch's
under torch.compile and where the bias needs a gradient (slopes.py). None is as large as [B, V].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsbench import reference
from fsbench.kernels.checks.autocast import without_autocast
from fsbench.kernels.launch.request import Request
from fsbench.kernels.launch.result import Score
from fsbench.kernels.scoring.slopes import of_chunk, slopes, slopes_by_torch

AT_ONCE = 1024
"""Rows, and tokens, of a chunk, and twice as many by the kernel; fewer where D is above 4096. All
that a chunk needs is 64 MB. By the kernel a chunk of fewer rows has the more tokens."""
_NUMBERS = 1024 * 4096
_BYTES = 60_000_000


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
    def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, request: Request,
                carry_out: Any) -> Score:  # fmt: skip
        # Those of the request may be wrapped by torch.func.grad.
        found: Score = carry_out(request._replace(hidden=hidden, weight=weight, bias=bias))
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        hidden, weight, bias, request, _ = inputs
        found = Score(*output)
        ctx.save_for_backward(hidden, weight, bias, request.seed, found.logz, found.entropy)
        ctx.request = request._replace(hidden=None, weight=None, bias=None, seed=None)
        ctx.mark_non_differentiable(*(x for x in (found.valid, found.rank) if x is not None))

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


@without_autocast
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
    if B == 0:
        of_bias = None if bias is None else torch.zeros_like(bias)
        return Gradients(torch.zeros_like(hidden), torch.zeros_like(weight), of_bias)
    defined = logz.isfinite()[:, None]
    counts = (request.seed >= 0) & (request.seed < V) & defined
    inverse = reference.inverse_temperature(request.temperature, device).float().expand(B, 1)
    g = (d_logprob.where(counts, 0.0) * inverse).contiguous()
    # Of each row: 1/T, log Z, a = (h - sum of all g) / T; H, and b = e / T.
    columns = [inverse, logz[:, None], d_logz[:, None] * inverse - g.sum(1, keepdim=True)]
    if of_entropy is not None:
        columns += [of_entropy[0][:, None], of_entropy[1][:, None] * inverse]
    numbers = torch.cat(columns, 1)

    d_hidden = torch.empty_like(hidden) if wanted[0] else None
    d_weight = torch.empty_like(weight) if wanted[1] else None
    if d_weight is not None:
        d_weight[V:] = 0.0
    d_bias = None
    if wanted[2] and bias is not None:
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=device)
    by_kernel = not (device.type == "cpu" or d_bias is not None or torch.compiler.is_compiling())
    size = _at_once(D, hidden.element_size(), by_kernel)
    rows_at_once = min(size, B)
    tokens_at_once = size * size // rows_at_once // size * size if by_kernel else size
    shape = (rows_at_once, min(tokens_at_once, V))
    all_logits = torch.empty(shape, dtype=torch.float32, device=device)
    all_d = torch.empty(shape, dtype=hidden.dtype, device=device)
    if d_hidden is not None:
        sums = torch.empty(shape[0], D, dtype=torch.float32, device=device)
    for first_row in range(0, B, size):
        rows = slice(first_row, min(B, first_row + size))
        # A NaN times 0 would reach the gradient of the weight. The gradient of these rows, which
        # is written last, lends its memory.
        h = torch.empty_like(hidden[rows]) if d_hidden is None else d_hidden[rows]
        h.copy_(hidden[rows]).masked_fill_(~defined[rows], 0.0)
        if d_hidden is not None:
            of_rows = sums[: len(h)]
        for first in range(0, V, tokens_at_once):
            tokens = slice(first, min(V, first + tokens_at_once))
            w = weight[tokens]
            logits, d = (x[: len(h), : len(w)] for x in (all_logits, all_d))
            _add_product(h, w.T, logits, True)
            chunk = (logits, of_chunk(request, rows, tokens), first, numbers[rows], g[rows], d)
            if by_kernel:
                slopes(*chunk)
            else:
                of_bias = slopes_by_torch(*chunk)
                if d_bias is not None and d_bias.ndim == 2:
                    d_bias[rows, tokens] = of_bias
                elif d_bias is not None:
                    d_bias[tokens] += of_bias.sum(0)
            if d_hidden is not None:
                _add_product(d, w, of_rows, first == 0)
            if d_weight is not None:
                _add_product(d.T, h, d_weight[tokens], first_row == 0)
        if d_hidden is not None:
            d_hidden[rows] = of_rows.masked_fill_(~defined[rows], 0.0)
    if d_bias is not None and bias is not None:
        d_bias = d_bias.to(bias.dtype)
    return Gradients(d_hidden, d_weight, d_bias)


def _at_once(D: int, itemsize: int, by_kernel: bool) -> int:
    """Rows, and tokens, of a chunk: a multiple of 32."""
    if not by_kernel:
        return min(AT_ONCE, max(32, _NUMBERS // D // 32 * 32))
    # size^2 logits of 4 bytes and d of itemsize, and D fp32 gradients for each row.
    each = 4 + itemsize
    size = (math.isqrt((2 * D) ** 2 + each * _BYTES) - 2 * D) // each
    return min(2 * AT_ONCE, max(32, size // 128 * 128))


def _add_product(a: Tensor, b: Tensor, total: Tensor, first: bool) -> None:
    """total += a @ b; = if first. total: fp32, or of the dtype of a and b. On a GPU one launch."""
    on_cpu = a.device.type == "cpu"
    if on_cpu or torch.compiler.is_compiling():  # which knows no addmm of two dtypes
        wide = on_cpu or a.dtype == torch.float32
        product = a.float() @ b.float() if wide else torch.mm(a, b, out_dtype=torch.float32)
        total.copy_(product if first else product.add_(total))
    elif a.dtype == total.dtype:
        total.addmm_(a, b, beta=int(not first))
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, beta=int(not first), out=total)
