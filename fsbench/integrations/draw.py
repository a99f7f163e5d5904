"""Sample an engine's decode step: LM head and sampling in one call, with any sampler.

`flash_sample` is for serving: each request has its temperature, seed and filters. `screened` adds
token noise and an int8 copy of the head, which draws small batches of requests without options or
with a small top-k (docs/guide/screened-head.md). Any other name is an exact sampler of
`fsbench list`, for comparison: it draws as `fsbench run` times it, at T = 1 and with one seed for
the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fsbench.discover import available, discover, select
from fsbench.errors import InvalidArgument, unknown_name
from fsbench.integrations.routing import (
    FLASH_SAMPLE,
    SCREENED,
    SHARDED_HEAD_NEEDS,
    WHOLE_HEAD_NEEDS,
    Need,
)
from fsbench.kernels import (
    Penalties,
    Sample,
    TruncatedSample,
    VocabShard,
    flash_sample,
    prepare_head,
    score,
    truncated_sample,
)
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider

DRAW_MARK, MATMUL_MARK = "fsbench: draw", "fsbench: LM head"
"""Ranges in torch profiles: LM head and sampling together; an LM head that is computed alone."""

SERVING = {FLASH_SAMPLE: "FlashSampling", SCREENED: "FlashSampling, screened"}
"""Samplers that serve requests of every kind -> label for legends."""


@dataclass(frozen=True)
class Head:
    """An LM head.

    Attributes:
        weight: [vocab_size or more, D], or this rank's shard of it.
        soft_cap: logits become c tanh(logits / c), or None.
    """

    weight: Tensor | VocabShard
    vocab_size: int
    soft_cap: float | None = None


class LogprobRequest(NamedTuple):
    """Log-probabilities to return with the tokens.

    Attributes:
        top: number of most likely tokens to include, up to 20.
        raw: whether they are those of softmax(logits) under the mask, in place of those of the
            sampled distribution.
    """

    top: int = 0
    raw: bool = True


class Rows(NamedTuple):
    """B rows of a decode step. Tensors are contiguous and on the device of hidden.

    Attributes:
        hidden: [B, D].
        temperature: fp32 [B]; 0 is greedy.
        seed: int64 [B], one per request.
        offset: int64 [B], the position of the token that was fed; or [1] if all rows share it.
        filters: (top_k int32 [B], top_p fp32 [B], min_p fp32 [B]); the values that switch them off
            are those of truncated_sample.
        bias: fp32 [B, V], as flash_sample takes it.
        mask: int32 [B, V / 32 or more], as flash_sample takes it.
        logprobs: log-probabilities to return, or None.
        raw_rows: int64 [n], rows whose raw log-probabilities need another pass over the head: those
            with a bias or penalties. Or None.
        screened: whether filters use the screened head; Draw.screens decides. The tokens are the
            same. If a row's top_k is off, the draw computes all its logits after those of the copy.
    """

    hidden: Tensor
    temperature: Tensor
    seed: Tensor
    offset: Tensor
    filters: tuple[Tensor, Tensor, Tensor] | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    penalties: Penalties | None = None
    logprobs: LogprobRequest | None = None
    raw_rows: Tensor | None = None
    screened: bool = False


class TokenLogprobs(NamedTuple):
    """Log-probabilities in vLLM's layout.

    Attributes:
        tokens: int64 [B, 1 + n], the sampled token and the n most likely ones.
        values: fp32 [B, 1 + n], their log-probabilities; -inf where a token is forbidden.
        ranks: int64 [B], the sampled token's rank from 1; tokens with equal logits share the best
            rank. 0 is unknown.
    """

    tokens: Tensor
    values: Tensor
    ranks: Tensor


class DrawResult(NamedTuple):
    """Results of a draw.

    Attributes:
        tokens: int64 [B]; -1 where a row has no finite logit, if the sampler reports it.
        logprobs: those of rows.logprobs, or None.
    """

    tokens: Tensor
    logprobs: TokenLogprobs | None = None


class Draw(Protocol):
    """LM head and sampling of one decode step.

    Attributes:
        supported: the needs of a row that it meets.
    """

    supported: Need

    def __call__(self, rows: Rows) -> DrawResult:
        """Draw a token for each row."""

    def screens(self, B: int, largest_k: int) -> bool:
        """Return whether B rows with filters may be `screened`, without waiting for the GPU.

        Args:
            largest_k: the largest top_k of the rows: V where it is off, 1 for a greedy row.
        """


def sampler_labels() -> dict[str, tuple[str, bool]]:
    """Return name -> (label for legends, whether logits stay on chip) of make_draw's samplers."""
    labels = {name: (label, True) for name, label in SERVING.items()}
    for name, entry in discover().items():
        if entry.provider is not None and entry.provider.kind is Kind.EXACT:
            labels[name] = (entry.provider.label, entry.provider.capabilities.fused)
    return labels


def unavailable_reason(name: str, device: str) -> str | None:
    """Return why a sampler cannot run on `device` (cuda or cpu), or None.

    On a CPU flash_sample and screened run their reference.

    Raises:
        InvalidArgument: an unknown name, or one of a sampler that is not exact.
    """
    if name in SERVING:
        return None
    sampler_label(name)
    return discover()[name].unavailable_reason(device)


def sampler_label(name: str) -> tuple[str, bool]:
    """Return the entry of sampler_labels; raise InvalidArgument for an unknown name."""
    labels = sampler_labels()
    if name not in labels:
        raise unknown_name("sampler", name, labels)
    return labels[name]


def make_draw(name: str, head: Head) -> FlashSampleDraw | ProviderDraw:
    """Make a draw from an LM head with the named sampler.

    Raises:
        InvalidArgument: an unknown name; a sharded head, which only flash_sample takes; or a soft
            cap with a sampler of `fsbench list`.
        ProviderUnavailable: the sampler cannot run here.
    """
    if name in SERVING:
        return FlashSampleDraw(head, screened=name == SCREENED)
    sampler_label(name)
    matrix = head.weight.weight if isinstance(head.weight, VocabShard) else head.weight
    (entry,) = select(discover(), [name])
    return ProviderDraw(available(entry, matrix.device.type), head)


class FlashSampleDraw:
    """Draw with flash_sample, or with truncated_sample where logits have to be stored.

    truncated_sample needs the whole LM head on one GPU. A sharded head gives no ranks and no most
    likely tokens.

    Args:
        screened: keep an int8 copy of the head, and use it where it is faster for rows without
            log-probabilities; for filters only if every top-k is small. All rows then use token
            noise, so that a token does not depend on the batch.
        noise: as flash_sample takes it.

    Attributes:
        extra_bytes: memory that it keeps in addition to the head.

    Raises:
        InvalidArgument: screened with a sharded head.
    """

    def __init__(self, head: Head, screened: bool = False, noise: str = "auto"):
        self._head, self._whole = head, isinstance(head.weight, Tensor)
        self._noise, self._copy = "token" if screened else noise, None
        self._no_seed: Tensor | None = None
        if screened:
            if not isinstance(head.weight, Tensor):
                raise InvalidArgument(
                    f"{SCREENED}: expected a whole LM head; got a VocabShard. Use {FLASH_SAMPLE}"
                )
            self._copy = prepare_head(head.weight)
        self.extra_bytes = 0 if self._copy is None else self._copy.extra_bytes
        self.supported = WHOLE_HEAD_NEEDS if self._whole else SHARDED_HEAD_NEEDS

    def refresh(self) -> None:
        """Read the weight again after it was written to in place; graphs stay valid."""
        if self._copy is not None:
            self._copy.refresh()

    def screens(self, B: int, largest_k: int) -> bool:
        if self._copy is None:
            return False
        hidden = self._copy.weight[:1].expand(B, -1)  # only its shape is read
        configs, _ = self._copy.choice(hidden, self._head.vocab_size, largest_k)
        return configs is not None

    def greedy(self, hidden: Tensor) -> Tensor:
        """Return the most likely token of each row of hidden [B, D], int64 [B], or 0.

        The host does not wait. Call it once before a CUDA graph captures it.
        """
        if self._no_seed is None:
            self._no_seed = torch.zeros(1, dtype=torch.int64, device=hidden.device)
        drawn = flash_sample(
            hidden,
            self._copy or self._head.weight,
            temperature=0.0,
            seed=self._no_seed,
            soft_cap=self._head.soft_cap,
            vocab_size=self._head.vocab_size if self._whole else None,
            noise=self._noise,
        )
        return drawn.tokens.clamp(min=0)

    def __call__(self, rows: Rows) -> DrawResult:
        weight, logprobs = self._head.weight, rows.logprobs
        options: dict[str, Any] = {
            "temperature": rows.temperature,
            "bias": rows.bias,
            "mask": rows.mask,
            "seed": rows.seed,
            "offset": rows.offset,
            "soft_cap": self._head.soft_cap,
            "vocab_size": self._head.vocab_size if self._whole else None,
            "noise": self._noise,
            "return_logprob": logprobs is not None,
            "return_rank": logprobs is not None and self._whole,
            "return_top": 0 if logprobs is None else logprobs.top,
        }
        if rows.filters is None and rows.penalties is None:
            sample = flash_sample(rows.hidden, self._copy or weight, **options)
            return DrawResult(sample.tokens, self._token_logprobs(rows, sample))
        assert isinstance(weight, Tensor)
        of_kept = logprobs is not None and not logprobs.raw
        top_k, top_p, min_p = rows.filters or (0, 1.0, 0.0)
        filtered = truncated_sample(
            rows.hidden,
            self._copy if rows.screened and self._copy is not None else weight,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            penalties=rows.penalties,
            return_kept=of_kept,
            return_kept_logprob=of_kept,
            logprob_temperature=None if logprobs is None or of_kept else 1.0,
            **options,
        )
        reported = kept_logprobs(filtered, rows) if of_kept else filtered
        return DrawResult(filtered.tokens, self._token_logprobs(rows, reported))

    def _token_logprobs(self, rows: Rows, sample: Sample | TruncatedSample) -> TokenLogprobs | None:
        """Convert a sample's log-probabilities to vLLM's layout."""
        if rows.logprobs is None or sample.logprob is None:
            return None
        tokens, logprob, rank = sample.tokens, sample.logprob, sample.rank
        top, top_logprob = sample.top_tokens, sample.top_logprob
        if rows.raw_rows is not None:
            sampled = (logprob, rank, top, top_logprob)
            raw = self._raw_logprobs(rows, tokens[rows.raw_rows])
            for values, raw_values in zip(sampled, raw, strict=True):
                if values is not None and raw_values is not None:
                    values.index_copy_(0, rows.raw_rows, raw_values)
        ranks = (rows.temperature == 0).long() - 1 if rank is None else rank
        ids, logprobs = tokens.clamp(min=0)[:, None], logprob[:, None]
        if top is not None and top_logprob is not None:
            ids = torch.cat([ids, fill_missing_ids(top)], 1)
            logprobs = torch.cat([logprobs, top_logprob], 1)
        return TokenLogprobs(ids, logprobs, ranks.long() + 1)

    def _raw_logprobs(self, rows: Rows, tokens: Tensor) -> tuple[Tensor | None, ...]:
        """Return (log-probability, rank, top tokens, their log-probabilities) by the raw logits.

        Args:
            tokens: int64 [n], the sampled tokens of rows.raw_rows.
        """
        weight, logprobs = self._head.weight, rows.logprobs
        assert isinstance(weight, Tensor) and rows.raw_rows is not None and logprobs is not None
        hidden, mask = rows.hidden[rows.raw_rows], rows.mask
        options: dict[str, Any] = {
            "mask": None if mask is None else mask[rows.raw_rows],
            "soft_cap": self._head.soft_cap,
            "vocab_size": self._head.vocab_size,
        }
        scored = score(hidden, weight, tokens, return_rank=True, **options)
        if not logprobs.top:
            return scored.logprob, scored.rank, None, None
        top = flash_sample(hidden, weight, seed=rows.seed[:1], return_top=logprobs.top, **options)
        return scored.logprob, scored.rank, top.top_tokens, top.top_logprob


def kept_logprobs(sample: TruncatedSample, rows: Rows) -> TruncatedSample:
    """Renormalize log-probabilities to the tokens that the filters keep; not of greedy rows."""
    assert sample.logprob is not None and sample.kept_logprob is not None
    assert sample.kept is not None
    greedy = rows.temperature == 0
    shift = (sample.kept_logprob - sample.logprob).masked_fill(greedy, 0.0)
    top = sample.top_logprob
    if top is not None:
        index = torch.arange(top.shape[1], device=top.device)
        removed = (index >= sample.kept[:, None]) & ~greedy[:, None]
        top = (top + shift[:, None]).masked_fill(removed, -torch.inf)
    logprob = torch.where(greedy, sample.logprob, sample.kept_logprob)
    return sample._replace(logprob=logprob, top_logprob=top)


def fill_missing_ids(tokens: Tensor) -> Tensor:
    """Replace each -1 in tokens int64 [B, n] by an id that is not in its row.

    A row has a -1 if fewer than n tokens are allowed. vLLM then lists forbidden tokens, too.
    """
    n = tokens.shape[1]
    ids = torch.arange(2 * n, device=tokens.device)
    used = (tokens[:, :, None] == ids).any(1)
    return torch.where(tokens < 0, used.int().argsort(dim=1, stable=True)[:, :n], tokens)


class ProviderDraw:
    """Draw with a sampler as `fsbench run` builds it, for comparison: rows at T = 1 only.

    Raises:
        InvalidArgument: the head is sharded or has a soft cap, which a Problem does not describe.
    """

    supported, extra_bytes = Need(0), 0

    def __init__(self, provider: Provider, head: Head):
        if not isinstance(head.weight, torch.Tensor) or head.soft_cap is not None:
            raise InvalidArgument(
                f"{provider.name}: expected a whole LM head without a soft cap. Use {FLASH_SAMPLE}"
            )
        self._provider = provider
        self._weight = head.weight[: head.vocab_size]
        self._launch = cache(self._build)

    def __call__(self, rows: Rows) -> DrawResult:
        launch = self._launch(len(rows.hidden))
        return DrawResult(launch(rows.hidden, rows.seed[:1], rows.offset[:1]))

    def screens(self, B: int, largest_k: int) -> bool:
        return False

    def refresh(self) -> None:
        """Do nothing: data that a sampler derives from the weight is not made again."""

    def _build(self, B: int) -> Launch:
        V, D = self._weight.shape
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        dtype = names[self._weight.dtype]
        return self._provider.build(
            Problem(B, D, V, dtype, device=self._weight.device.type), self._weight
        )
