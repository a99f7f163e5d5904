"""`draft_sample`: the draw of a reduced draft head, with the noise of the target's tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import drafting
from fsbench.kernels.checks.tensors import check_matrices, check_top_k, without_autocast
from fsbench.kernels.checks.values import MAX_V
from fsbench.kernels.configs.gpu import runs_kernels
from fsbench.kernels.drafting.vocabulary import DraftVocabulary, noise_by_reference
from fsbench.kernels.fused.api import flash_sample
from fsbench.kernels.launch.quantized import LARGEST_NUMBERS, QuantizedHead
from fsbench.kernels.launch.request import Filters, Request, checked_request, greedy, raw_logits
from fsbench.kernels.launch.result import Extras, Sample, Screened, TruncatedSample, empty_sample
from fsbench.kernels.screened.api import screened_sample
from fsbench.kernels.screened.head import ScreenedHead
from fsbench.kernels.truncated.api import compute
from fsbench.kernels.truncated.penalties import (
    Penalties,
    check_fraction,
    check_penalties,
)


def draft_sample(
    hidden: Tensor,
    head: Tensor | ScreenedHead | QuantizedHead,
    vocabulary: DraftVocabulary,
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
) -> Sample:
    """Draw drafts with the target's token noise from a draft head with some of its tokens.

    A target that draws with noise="token", the same seed and the same offset draws this token with
    the probability that docs/guide/speculation.md gives. (For a draft head of the whole vocabulary
    use flash_sample, screened_sample or truncated_sample: they draw with the noise of the target.)

    Args:
        hidden: [B, D] of the drafter.
        head: The weight of the draft head, [>= V_draft, D], a ScreenedHead of it, or a
            QuantizedHead.
        vocabulary: The tokens of the head, from prepare_draft_vocabulary.
        temperature, top_k, top_p, min_p, penalties, bias, mask, seed, offset, soft_cap: Arguments
            of the target's request, over the target's vocabulary; see truncated_sample. Filters
            keep tokens of the draft head, by its logits.

    Of equal scores the first row of the head is drawn; the target draws the lower token id. Both
    are the same if token_ids ascend. With filters or penalties the lower token id is drawn.

    Returns:
        Sample with the target's token ids. A row without a draw has -1, which verify_drafts treats
        as no draft.

    Without filters and penalties one launch makes the noise, [B, V_draft] fp32, and greedy decoding
    takes it as a bias. With them the logits are stored at the target's token ids, [B, V] fp32, and
    drawn from as in truncated_sample. The host does not wait for the GPU, and CUDA graphs may
    capture the call, as for these functions. It runs on a CPU, too.

    Raises:
        InvalidType, InvalidArgument: An argument of the wrong type, dtype, shape, device, layout or
            range, or a ScreenedHead with filters or penalties; nothing has been launched.
        CaptureError: As flash_sample.
    """
    weight = head.weight if isinstance(head, ScreenedHead | QuantizedHead) else head
    dtypes = tuple(LARGEST_NUMBERS) if isinstance(head, QuantizedHead) else ()
    hidden, weight = check_matrices(hidden, weight, dtypes)
    ids, V = _checked(vocabulary, weight)
    B, device = len(hidden), hidden.device
    filters = Filters(
        check_top_k(top_k, B, V, device),
        check_fraction("top_p", top_p, B, device),
        check_fraction("min_p", min_p, B, device),
    )
    if penalties is not None:
        check_penalties(penalties, B, device)
    request = checked_request(
        hidden,
        head if isinstance(head, QuantizedHead) else weight,
        seed=seed,
        offset=offset,
        temperature=temperature,
        soft_cap=soft_cap,
        bias=vocabulary.bias(bias, B),
        mask=vocabulary.mask(mask, B),
        vocab_size=len(ids),
        noise="token",
        may_be_quantized=True,
    )
    if not B:
        return empty_sample(request, Extras())
    if penalties is not None or not filters.keep_all():
        if isinstance(head, ScreenedHead):
            raise InvalidArgument(
                "head: expected a weight with filters or penalties; got a ScreenedHead"
            )
        return _from_kept(request, vocabulary, filters, penalties)
    bias = request.bias
    if not greedy(request):
        bias = _noise(request, vocabulary) if bias is None else bias + _noise(request, vocabulary)
    greedy_call: dict[str, Any] = {
        "temperature": 0.0,
        "bias": bias,
        "mask": request.mask,
        "seed": request.seed,
        "soft_cap": soft_cap,
        "vocab_size": len(ids),
    }
    drawn: Sample | Screened
    if isinstance(head, ScreenedHead):
        drawn = screened_sample(hidden, head, **greedy_call)
    else:
        drawn = flash_sample(hidden, head, noise="token", **greedy_call)
    tokens = torch.where(drawn.valid, ids[drawn.tokens.clamp_min(0)], -1)
    return Sample(tokens, drawn.valid)


def _checked(vocabulary: object, weight: Tensor) -> tuple[Tensor, int]:
    """Return (token_ids, V) of a DraftVocabulary after checks against the weight."""
    if not isinstance(vocabulary, DraftVocabulary):
        raise InvalidType(
            "vocabulary: expected a DraftVocabulary, of prepare_draft_vocabulary; "
            f"got {type(vocabulary).__name__}"
        )
    ids, V = vocabulary.token_ids, vocabulary.vocab_size
    rows = len(ids)
    if ids.device != weight.device:
        raise InvalidArgument(
            f"vocabulary.token_ids: expected it on the weight's {weight.device}; got {ids.device}"
        )
    if rows > len(weight):
        raise InvalidArgument(
            f"vocabulary: expected at most {len(weight)} tokens, the rows of the head; got {rows}"
        )
    if V > MAX_V:
        raise InvalidArgument(f"vocabulary: expected at most {MAX_V} tokens of a target; got {V}")
    return ids, V


def _noise(request: Request, vocabulary: DraftVocabulary) -> Tensor:
    ids, V = vocabulary.token_ids, vocabulary.vocab_size
    if runs_kernels(ids.device, request.hidden.dtype):
        return drafting.launch.scaled_noise(request, ids)
    B = len(request.hidden)
    return noise_by_reference(ids, V, request.seed, request.steps(), request.temperature, B)


@without_autocast
def _from_kept(
    request: Request,
    vocabulary: DraftVocabulary,
    filters: Filters,
    penalties: Penalties | None,
) -> Sample:
    """Draw with filters or penalties, from logits at the target's token ids."""
    hidden = request.hidden
    out = empty_sample(request, Extras())
    request = request._replace(noise="none")  # skip the draw from all tokens
    if runs_kernels(hidden.device, hidden.dtype):
        drafting.launch.launch_filtered(request, vocabulary, filters, penalties, out)
        return out
    logits = reference.processed_logits(
        raw_logits(request), soft_cap=request.soft_cap, bias=request.bias, mask=request.mask
    )
    logits = vocabulary.spread(logits, vocabulary.vocab_size)
    compute(request, logits, filters, penalties, TruncatedSample(out.tokens, out.valid))
    return out
