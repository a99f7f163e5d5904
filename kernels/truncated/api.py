"""`truncated_sample`: top-k, top-p, min-p and penalties on the fused path."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import InvalidArgument
from fsbench.kernels import truncated
from fsbench.kernels.checks.tensors import check_top_k, without_autocast
from fsbench.kernels.checks.values import (
    MAX_SUPPORT,
    MAX_TOP,
    MAX_V,
    check_flag,
    check_integer,
    check_kernel,
    check_number,
    check_screened_noise,
)
from fsbench.kernels.configs.choice import choose
from fsbench.kernels.configs.gpu import runs_kernels
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.launch.heads import PreparedHead
from fsbench.kernels.launch.request import (
    Filters,
    Request,
    checked_request,
    raw_logits,
)
from fsbench.kernels.launch.result import TruncatedSample
from fsbench.kernels.truncated.penalties import (
    Penalties,
    amounts,
    check_fraction,
    check_penalties,
)


def truncated_sample(
    hidden: Tensor,
    weight: Tensor | PreparedHead,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    penalties: Penalties | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    seed: Tensor | int,
    offset: Tensor | int | None = None,
    soft_cap: float | None = None,
    vocab_size: int | None = None,
    return_kept: bool = False,
    return_logprob: bool = False,
    return_kept_logprob: bool = False,
    return_rank: bool = False,
    return_support: int = 0,
    return_top: int = 0,
    logprob_temperature: float | None = None,
    noise: str = "auto",
    config: TileConfig | HopperConfig | None = None,
) -> TruncatedSample:
    """Draw from softmax(logits / temperature) over the tokens that the filters keep.

    logits = hidden @ weight.T in fp32, then soft cap, bias and mask, then penalties. One copy of
    these logits is stored, and all decisions use it. The filters are those of
    fsbench.reference.truncate in fsbench's order: min-p, then top-k, then top-p of the remaining
    mass. Of equal logits the lower token is first, and top-k keeps exactly k.

    Args:
        hidden, temperature, bias, mask, seed, offset, soft_cap, vocab_size: as in flash_sample. A
            greedy row takes the largest logit, whatever its filters.
        weight: as in flash_sample, or a ScreenedHead. With a ScreenedHead, a top_k of 1 to 64, or
            a top_k tensor, reads half of the bytes at small batches; other calls read the head's
            weight (docs/guide/screened-head.md). The tokens do not depend on it.
        top_k: keep the k largest logits. 0 or below turns the filter off, as does a k of at least
            the number of tokens. An integer, or int32 or int64 [B].
        top_p: keep the smallest set of the most likely tokens whose probability reaches p; 1 or
            above is off, and 0 or below keeps one token. A number, or fp32 [B]; a row with NaN has
            no draw.
        min_p: keep tokens with at least this fraction of the largest probability; 0 or below is
            off. A number, or fp32 [B]; a row with NaN has no draw.
        penalties: Penalties on the tokens of a TokenHistory; only these tokens cost time.
        return_kept: fill this field. It costs time: without it the search for a row's cutoff ends
            when the token is decided.
        return_logprob: fill this field, with the bits that score and flash_sample return for the
            token. With penalties, which these do not have, it is that of the changed logits.
        return_kept_logprob: fill this field, with the bits that score returns for the token with
            the kept tokens as the mask. It costs time, as return_kept does.
        return_rank: fill this field, the rank among all tokens, kept or not.
        return_support: fill this field with up to this number of kept tokens of a row, at most
            1024, and `kept`, which is above the number in a row with more kept tokens. It costs
            time, as return_kept does.
        return_top: number of the largest logits to return, up to 20, as in flash_sample.
        logprob_temperature: temperature of logprob and top_logprob, for all rows: with 1 they are
            those of softmax(logits), at any sampling temperature. By default the row's temperature.
        noise: of the first draw below, as in flash_sample. With "token" both draws have the noise
            of the second draw, so that they are one race of the kept tokens; drafts match that more
            often (docs/guide/speculation.md). A ScreenedHead takes "auto" or "token", which are
            equal there.
        config: tile shapes, which also select one of flash_sample's kernels; by default its choice.

    Returns:
        TruncatedSample. A row with a NaN or +inf logit, or without a finite one, has no draw.

    The first draw is flash_sample's, from all tokens; if the filters keep it, it is the row's
    token. If not, or with penalties, the token is the kept one with the largest logit + temperature
    Gumbel, with token noise (docs/design/noise.md). Both draws are keyed by seed, offset, row and
    token, so the token depends on neither tile nor batch size, and with all filters off it is
    flash_sample's with the same noise. Top-k is exact. Sums of probabilities are rounded, so top-p
    is met within 2^-16 of the mass. Calls that return the same fields always decide in the same
    way; a call that returns the kept tokens may decide differently about a token this near the
    cutoff.

    Launches: one without filters, two for a small top_k of all rows, up to eight for other filters
    (with top_p alone, a smaller top_p needs more), two more from a screened head, one more to pack
    a mask of bools, and up to seven for fields in addition to tokens and valid. [B, V] fp32 logits
    are allocated, and about 10 % more. As for flash_sample, the host does not wait for the GPU.
    CUDA graphs may capture the call after one launch outside; replays read seed, offset, and all
    [B] arguments again. On CPU tensors it runs fsbench.reference, or under TRITON_INTERPRET=1 the
    kernels (not in bf16).

    Raises:
        InvalidType, InvalidArgument: an argument of the wrong type, dtype, shape, device, layout or
            range, or a config that this device cannot run. Nothing has been launched.
        CaptureError: the workspaces for captures are used up.
    """
    head = None
    if isinstance(weight, PreparedHead):
        head, weight = weight, weight.weight
        head.validate()
        noise = check_screened_noise(noise)
    request = checked_request(
        hidden,
        weight,
        seed=seed,
        offset=offset,
        temperature=temperature,
        soft_cap=soft_cap,
        bias=bias,
        mask=mask,
        vocab_size=vocab_size,
        noise=noise,
    )
    if request.vocab_size > MAX_V:
        raise InvalidArgument(f"weight: expected at most {MAX_V} tokens; got {request.vocab_size}")
    B, device = hidden.shape[0], hidden.device
    filters = Filters(
        check_top_k(top_k, B, request.vocab_size, device),
        check_fraction("top_p", top_p, B, device),
        check_fraction("min_p", min_p, B, device),
    )
    flags = {
        "return_kept": return_kept,
        "return_logprob": return_logprob,
        "return_kept_logprob": return_kept_logprob,
        "return_rank": return_rank,
    }
    for name, flag in flags.items():
        check_flag(name, flag)
    limit = check_integer("return_support", return_support, 0, MAX_SUPPORT)
    top = check_integer("return_top", return_top, 0, MAX_TOP)
    logprob_request = None
    if logprob_temperature is not None:
        T = check_number("logprob_temperature", logprob_temperature, positive=True)
        logprob_request = request._replace(temperature=T)
    kernel = check_kernel("auto", config)
    if penalties is not None:
        check_penalties(penalties, B, device)
        # Penalties change the logits after they are stored, so a draw before that is not used.
        request = request._replace(noise="none")
    runs = runs_kernels(device, hidden.dtype)
    if config is not None or not runs:  # otherwise a launch that is not cached makes the choice
        choose(hidden, weight, request.noise, kernel, config)  # raises if the config cannot run
    empty = partial(torch.empty, device=device)
    sample = TruncatedSample(
        empty(B, dtype=torch.int64),
        empty(B, dtype=torch.bool),
        torch.zeros(B, dtype=torch.int32, device=device) if return_kept or limit else None,
        empty(B, dtype=torch.float32) if return_logprob else None,
        empty(B, dtype=torch.float32) if return_kept_logprob else None,
        empty(B, dtype=torch.int32) if return_rank else None,
        empty(B, limit, dtype=torch.int64) if limit else None,
        empty(B, top, dtype=torch.int64) if top else None,
        empty(B, top, dtype=torch.float32) if top else None,
    )
    if not B:
        return sample
    chosen = None
    plain = penalties is None and config is None and all(field is None for field in sample[2:])
    if head is not None and plain:
        chosen, _ = head.choice(hidden, request.vocab_size, filters.top_k)
    if head is not None and chosen is not None:
        sample = sample._replace(found=empty(B, dtype=torch.int32))
        head.draw_filtered(request, filters, sample)
    elif runs:
        truncated.launch.launch(request, config, filters, penalties, sample, logprob_request)
    else:
        _by_reference(request, filters, penalties, sample, logprob_request)
    return sample


@without_autocast
def _by_reference(
    request: Request,
    filters: Filters,
    penalties: Penalties | None,
    sample: TruncatedSample,
    logprob_request: Request | None,
) -> None:
    """Draw as launch does, by fsbench.reference."""
    logits = reference.processed_logits(
        raw_logits(request), soft_cap=request.soft_cap, bias=request.bias, mask=request.mask
    )
    compute(request, logits, filters, penalties, sample, logprob_request)


def compute(
    request: Request,
    logits: Tensor,
    filters: Filters,
    penalties: Penalties | None,
    sample: TruncatedSample,
    logprob_request: Request | None = None,
) -> None:
    """Draw as launch does, by fsbench.reference, from logits fp32 [B, V] before penalties."""
    if penalties is not None:
        seen, counts = penalties.history.dense(logits.shape[1])
        logits = reference.penalized(logits, seen, counts, **amounts(penalties))
    kept = reference.truncate(logits, request.temperature, **filters._asdict())
    step = request.steps()
    noise = "token" if request.noise == "none" else request.noise
    tokens = reference.expect(
        logits, request.seed, step, request.temperature, noise, truncation=kept
    ).tokens
    sample.tokens.copy_(tokens)
    sample.valid.copy_(tokens >= 0)
    among = logits.masked_fill(~kept.kept, -torch.inf)
    _fill(request.temperature, (logprob_request or request).temperature, logits, among, sample)


def _fill(
    temperature: float | Tensor,
    logprob_temperature: float | Tensor,
    logits: Tensor,
    kept: Tensor,
    sample: TruncatedSample,
) -> None:
    """Fill the requested fields of `sample`; kept: the logits, -inf for tokens not kept."""
    valid, token = sample.valid, sample.tokens.clamp_min(0)
    for out, among, T in (
        (sample.logprob, logits, logprob_temperature),
        (sample.kept_logprob, kept, temperature),
    ):
        if out is not None:
            out.copy_(reference.log_probability(among, token, T).where(valid, torch.nan))
    if sample.top_tokens is not None and sample.top_logprob is not None:
        largest = reference.largest(logits, sample.top_tokens.shape[1], logprob_temperature)
        sample.top_tokens.copy_(largest[0].where(valid[:, None], -1))
        sample.top_logprob.copy_(largest[1].where(valid[:, None], torch.nan))
    if sample.rank is not None:
        sample.rank.copy_((logits > logits.gather(1, token[:, None])).sum(1).where(valid, -1))
    if sample.kept is not None:
        sample.kept.copy_((kept > -torch.inf).sum(1).where(valid, 0))
        if sample.support is not None:
            limit = sample.support.shape[1]
            order = kept.sort(dim=1, descending=True, stable=True).indices[:, :limit]
            place = torch.arange(order.shape[1], device=order.device)
            is_kept = (place < sample.kept[:, None]) & (sample.kept <= limit)[:, None]
            sample.support.fill_(-1)[:, : order.shape[1]] = order.where(is_kept, -1)
