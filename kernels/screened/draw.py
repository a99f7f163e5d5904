"""Run a checked request of a screened head: by kernels, by torch, or as a torch operator.

torch.ops.fsbench.screened_sample takes the head by its key, because an operator takes only tensors
and numbers. So every call of a compiled program still checks that the head's weight has not
changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsbench import reference
from fsbench.kernels import screened
from fsbench.kernels.checks.tensors import without_autocast
from fsbench.kernels.checks.values import ScreenConfigs
from fsbench.kernels.configs.gpu import runs_kernels
from fsbench.kernels.launch.operator import as_operator, is_traced
from fsbench.kernels.launch.request import Request
from fsbench.kernels.launch.result import Screened
from fsbench.kernels.screened.bounds import candidates, score_bounds, screen_hidden, screen_logits
from fsbench.kernels.screened.int8_copy import HeadCopy, check_copy
from fsbench.kernels.shard.vocab_shard import reachable


@torch.no_grad()
def draw(request: Request, head: HeadCopy, configs: ScreenConfigs | None, out: Screened) -> None:
    """Draw one token of each row into `out`. configs: of both launches; None for the defaults."""
    hidden = request.hidden
    # A CPU's ranks share no memory that a kernel could reach.
    if runs_kernels(hidden.device, hidden.dtype) and reachable(request.shard):
        screened.launch.launch(request, head, configs, out)
    else:
        _compute(request, head, out)


@without_autocast
def _compute(request: Request, head: HeadCopy, out: Screened) -> None:
    """Draw in torch: only the logits of candidates are computed, in fp32."""
    hidden, V, shard = request.hidden, request.vocab_size, request.shard
    # Tokens of other ranks' shards count as forbidden.
    shard_tokens = slice(0, V)
    if shard is not None:
        shard_tokens = slice(shard.first_token, shard.first_token + shard.num_tokens)
    count = shard_tokens.stop - shard_tokens.start
    B = hidden.shape[0]
    T = reference.as_column(request.temperature, hidden.device).float().expand(B, 1)
    T = torch.where(T < reference.logits.SMALLEST_TEMPERATURE, 0.0, T)
    step = request.steps()
    rows = torch.arange(B, device=hidden.device) * (request.seed.numel() == 1)
    head = HeadCopy(*(part[:count] for part in (head.weight, *head.copy)))
    allowed = None
    if request.mask is not None:
        allowed = reference.logits.unpacked(request.mask, V)[:, shard_tokens]
    z, bound = screen_logits(head, screen_hidden(hidden))
    drawing = (shard_tokens.stop, request.seed, step, rows)
    lower, upper = score_bounds(
        z,
        bound,
        reference.token_noise(*drawing)[:, shard_tokens],
        T,
        soft_cap=request.soft_cap,
        bias=None if request.bias is None else request.bias[..., shard_tokens],
        allowed=allowed,
    )
    chosen = candidates(lower, upper)
    # Tokens that no row may draw are left out; a row's other tokens count as forbidden.
    chosen = torch.nn.functional.pad(chosen, (shard_tokens.start, V - shard_tokens.stop))
    listed = chosen.any(0).nonzero()[:, 0]
    logits = torch.full((B, V), -torch.inf, dtype=torch.float32, device=hidden.device)
    logits[:, listed] = hidden.float() @ head.weight[listed - shard_tokens.start].float().T
    logits = reference.processed_logits(
        logits, soft_cap=request.soft_cap, bias=request.bias, mask=chosen
    )
    expected = reference.expect(logits, request.seed, step, request.temperature, request.noise)
    tokens, _, scores = expected
    if shard is not None:
        tokens, _ = shard.best_of_ranks(tokens, scores, scores)
    out.tokens.copy_(tokens)
    out.valid.copy_(out.tokens >= 0)
    assert out.found is not None
    out.found.copy_(chosen.sum(1))


def carry_out(
    request: Request, head: HeadCopy, configs: ScreenConfigs | None, out: Screened
) -> None:
    """Draw the tokens of a checked request into `out`, as an operator if torch traces."""
    if not is_traced(request.hidden):
        draw(request, head, configs, out)
        return
    screen, resolve = configs or (None, None)
    of_call = {"head": head, "screen": screen, "resolve": resolve}
    assert out.found is not None
    screened_sample_op(
        {**dict(zip(Request._fields, request, strict=True)), **of_call},
        {"tokens": out.tokens, "valid": out.valid, "found": out.found},
    )


def _draw_values(values: dict[str, Any], results: dict[str, Tensor]) -> None:
    """Draw from the arguments that carry_out gave the operator."""
    head, screen, resolve = (values.pop(name, None) for name in ("head", "screen", "resolve"))
    request = Request(**{**dict.fromkeys(Request._fields), **values})
    configs = None if screen is None else (screen, resolve)
    draw(request, check_copy(head), configs, Screened(**results))


screened_sample_op = as_operator("screened_sample", _draw_values)
