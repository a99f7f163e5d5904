"""`screened_sample`: flash_sample with token noise by way of an int8 screen of the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsbench import reference
from fsbench.kernels import screened
from fsbench.kernels.call.request import Request, checked_request
from fsbench.kernels.call.result import Screened
from fsbench.kernels.checks.values import check_flag, check_screen_configs
from fsbench.kernels.configs.gpu import runs_kernels
from fsbench.kernels.configs.screen import (
    HopperScreenConfig,
    ResolveConfig,
    ScreenConfig,
    default_configs,
)
from fsbench.kernels.fused.api import flash_sample
from fsbench.kernels.screened.bounds import candidates, score_bounds, screen_hidden, screen_logits
from fsbench.kernels.screened.head import ScreenedHead, check_copy


def screened_sample(
    hidden: Tensor,
    head: ScreenedHead,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    seed: Tensor,
    offset: Tensor | None = None,
    num_samples: int = 1,
    soft_cap: float | None = None,
    vocab_size: int | None = None,
    return_logprob: bool = False,
    return_logz: bool = False,
    configs: tuple[ScreenConfig | HopperScreenConfig, ResolveConfig] | None = None,
) -> Screened:
    """The tokens of flash_sample(hidden, head.weight, noise="token"), at about half of the bytes.

    Arguments are those of flash_sample, with `head` from prepare_head or load_head in place of the
    weight. On a GPU the tokens are the same, not merely of the same law (docs/screened-head.md).

    Args:
        num_samples: above 1, the call is one of flash_sample: the same tokens, four to a pass over
            the weight, which is less than a pass over the copy for each.
        return_logprob, return_logz: log Z needs every logit, and the screen knows it only within
            its bounds. A call that asks for either is one of flash_sample, too: the same tokens,
            with both exact, at the price of the full kernel.
        configs: tile shapes of the two launches; by default those in use for B and this GPU.

    Returns:
        Screened: the fields of Sample, and how many tokens of each row were computed exactly.

    Two launches, which the host does not wait for, and nothing to clear between calls. As
    flash_sample it has a workspace of each stream, and may be captured in a CUDA
    graph after one launch outside. On CPU tensors it runs in torch, or under TRITON_INTERPRET=1 the
    kernels (but not in bf16).

    Raises:
        InvalidType, InvalidArgument: as flash_sample, or `head` is not a ScreenedHead whose parts
            fit each other and hidden.
        CaptureError: as flash_sample.
    """
    check_copy(head)
    configs = check_screen_configs(configs)
    check_flag("return_logprob", return_logprob)
    check_flag("return_logz", return_logz)
    arguments: dict[str, Any] = {
        "temperature": temperature,
        "bias": bias,
        "mask": mask,
        "seed": seed,
        "offset": offset,
        "num_samples": num_samples,
        "soft_cap": soft_cap,
        "vocab_size": vocab_size,
        "noise": "token",
    }
    one = isinstance(num_samples, int) and num_samples == 1
    if not one or return_logprob or return_logz:
        asked: dict[str, Any] = {"return_logprob": return_logprob, "return_logz": return_logz}
        drawn = flash_sample(hidden, head.weight, **arguments, **asked)
        return Screened(drawn.tokens, drawn.valid, drawn.logprob, drawn.logz)
    request = checked_request(hidden, head.weight, **arguments)
    B, device = hidden.shape[0], hidden.device
    out = Screened(
        torch.empty(B, dtype=torch.int64, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
        found=torch.empty(B, dtype=torch.int32, device=device),
    )
    if runs_kernels(device, hidden.dtype):
        configs = configs or default_configs(B, hidden.shape[1], device)
        screened.launch.launch(request, head, configs, out)
    else:
        _compute(request, head, out)
    return out


def _compute(request: Request, head: ScreenedHead, out: Screened) -> None:
    """By torch: only the logits of candidates are computed, in fp32."""
    hidden, V = request.hidden, request.vocab_size
    B = hidden.shape[0]
    T = torch.as_tensor(request.temperature).float().reshape(-1, 1).expand(B, 1)
    T = torch.where(T < reference.logits.SMALLEST_TEMPERATURE, 0.0, T)
    step = torch.zeros(1, dtype=torch.int64) if request.offset is None else request.offset
    rows = torch.arange(B) * (request.seed.numel() == 1)
    head = ScreenedHead(*(part[:V] for part in head))
    allowed = None
    if request.mask is not None:
        allowed = reference.logits.unpacked(request.mask, V)
    z, bound = screen_logits(head, screen_hidden(hidden))
    lower, upper = score_bounds(
        z,
        bound,
        reference.token_noise(V, request.seed, step, rows),
        T,
        soft_cap=request.soft_cap,
        bias=request.bias,
        allowed=allowed,
    )
    chosen = candidates(lower, upper)
    # What no row may draw is left out; a row's other tokens count as forbidden.
    some = chosen.any(0).nonzero()[:, 0]
    logits = torch.full((B, V), -torch.inf)
    logits[:, some] = hidden.float() @ head.weight[some].float().T
    logits = reference.processed_logits(
        logits, soft_cap=request.soft_cap, bias=request.bias, mask=chosen
    )
    expected = reference.expect(logits, request.seed, step, request.temperature, "token")
    out.tokens.copy_(expected.tokens)
    out.valid.copy_(out.tokens >= 0)
    assert out.found is not None
    out.found.copy_(chosen.sum(1))
