"""What stands in an engine's place of LM head and sampler: one function, whoever draws.

`flash_sample` is what an engine should run: each request has a temperature, seed and filters of its
own. `screened` is the same with token noise and an int8 copy of the head, by which small batches of
requests that are plain, or have a small top-k, are drawn (docs/guide/screened-head.md). Any other
name is an exact sampler of `fsbench list`, put into the engine to be compared with: it draws as
`fsbench run` times it, at T = 1 and with one seed for the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fsbench.discover import available, discover, select
from fsbench.errors import InvalidArgument, unknown_name
from fsbench.integrations.routing import SHARD_ABLE, WHOLE_ABLE, Need
from fsbench.kernels import (
    Penalties,
    Sample,
    TokenHistory,
    TruncatedSample,
    VocabShard,
    flash_sample,
    prepare_head,
    score,
    truncated_sample,
)
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider

FLASH_SAMPLE, SCREENED = "flash_sample", "screened"
OWN = {FLASH_SAMPLE: "FlashSampling", SCREENED: "FlashSampling, screened"}
"""What serves requests of every kind -> its label."""

DRAW_MARK, MATMUL_MARK = "fsbench: draw", "fsbench: LM head"
"""Ranges in torch profiles: LM head and sampling together, and the LM head, where it is apart."""


@dataclass(frozen=True)
class Head:
    """An LM head. weight: [vocab_size or more, D], or this rank's shard of it.

    soft_cap: logits become c tanh(logits / c), or None.
    """

    weight: Tensor | VocabShard
    vocab_size: int
    soft_cap: float | None = None


class LogprobRequest(NamedTuple):
    """What log-probabilities to tell beside tokens.

    top: of how many of the likeliest tokens, too, up to 20. raw: those of softmax(logits) under the
    mask, not those of what is drawn from.
    """

    top: int = 0
    raw: bool = True


class Rows(NamedTuple):
    """B rows of a decode step. All tensors are contiguous and on the device of hidden.

    hidden: [B, D]. temperature: fp32 [B]; 0 is greedy. seed: int64 [B], one per request.
    offset: int64 [B], or [1] if it is the same of all: the position of the token that was fed.
    filters: (top_k int32 [B], top_p fp32 [B], min_p fp32 [B]), off where flash_sample says so.
    bias: fp32 [B, V], mask: int32 [B, V / 32 or more], as flash_sample takes them.
    asked: what log-probabilities to tell, or None.
    apart: int64 [n], rows whose raw log-probabilities take a pass of their own: those with a bias
        or penalties. Or None.
    screened: whether the filters come from the screen, which Draw.screens has to allow. The tokens
        are the same; of a row whose top_k is off it would compute all logits, after the copy's.
    """

    hidden: Tensor
    temperature: Tensor
    seed: Tensor
    offset: Tensor
    filters: tuple[Tensor, Tensor, Tensor] | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    penalties: Penalties | None = None
    asked: LogprobRequest | None = None
    apart: Tensor | None = None
    screened: bool = False


class Told(NamedTuple):
    """Log-probabilities, as vLLM has them.

    tokens: int64 [B, 1 + n], the drawn one and the n likeliest. logprobs: fp32 [B, 1 + n], of each;
    -inf where a token is forbidden. ranks: int64 [B], of the drawn token, from 1; of tokens with
    equal logits all have the first one's rank. 0 where it is not known.
    """

    tokens: Tensor
    logprobs: Tensor
    ranks: Tensor


class DrawResult(NamedTuple):
    """tokens: int64 [B]; -1 where a row has no draw, if the sampler can tell."""

    tokens: Tensor
    told: Told | None = None


class Draw(Protocol):
    """LM head and sampling of one decode step. able: which needs of a row it can meet."""

    able: Need

    def __call__(self, rows: Rows) -> DrawResult:
        """Draw a token for each row."""

    def screens(self, B: int, largest_k: int) -> bool:
        """Whether B rows with filters may be `screened`. The host decides it, without the GPU.

        largest_k: of their top_k, with V where it is off, and 1 for a greedy row.
        """


class HeadDraw(Draw, Protocol):
    """A draw from a head. extra_bytes: of memory that it keeps beside it."""

    extra_bytes: int

    def refresh(self) -> None:
        """Follow a weight that has been written to, in place: graphs of the draw go on."""


def known() -> dict[str, tuple[str, bool]]:
    """Every name that `make_draw` takes -> (label for legends, whether logits stay on chip)."""
    found = {name: (label, True) for name, label in OWN.items()}
    for name, entry in discover().items():
        if entry.provider is not None and entry.provider.kind is Kind.EXACT:
            found[name] = (entry.provider.label, entry.provider.capabilities.fused)
    return found


def missing(name: str, device: str) -> str | None:
    """None if this sampler can run on `device` (cuda or cpu), else why not.

    On a CPU flash_sample and screened run their reference, and say so.

    Raises:
        InvalidArgument: nobody knows the name, or it is no exact sampler.
    """
    if name in OWN:
        return None
    names = known()
    if name not in names:
        raise unknown_name("sampler", name, names)
    return discover()[name].unavailable_reason(device)


def make_draw(name: str, head: Head) -> HeadDraw:
    """The sampler of this name over an LM head.

    Raises:
        InvalidArgument: nobody knows the name; or it is not flash_sample, and the head is sharded;
            or it is a sampler of `fsbench list`, and the head has a soft cap.
        ProviderUnavailable: it cannot run here.
    """
    if name in OWN:
        return FlashSampleDraw(head, screened=name == SCREENED)

    names = known()
    if name not in names:
        raise unknown_name("sampler", name, names)
    matrix = head.weight.weight if isinstance(head.weight, VocabShard) else head.weight
    (found,) = select(discover(), [name])
    return ProviderDraw(available(found, matrix.device.type), head)


class FlashSampleDraw:
    """See Draw. flash_sample, and truncated_sample where logits have to be stored.

    The second needs the whole LM head on one GPU. Over a sharded one there are no ranks and no
    likeliest tokens.

    screened: keep an int8 copy of the head, and draw rows without log-probabilities by it where
    that is faster, those with filters if all have a small top-k. The noise is of tokens then, for
    all rows, so that a token does not depend on the batch.

    Raises:
        InvalidArgument: screened, and the head is sharded.
    """

    def __init__(self, head: Head, screened: bool = False):
        self._head, self._whole = head, isinstance(head.weight, Tensor)
        self._noise, self._copy = "token" if screened else "auto", None
        self._no_seed: Tensor | None = None
        if screened:
            if not isinstance(head.weight, Tensor):
                raise InvalidArgument(
                    f"{SCREENED}: expected a whole LM head; got a VocabShard. {FLASH_SAMPLE} "
                    "takes it"
                )
            self._copy = prepare_head(head.weight)
        self.extra_bytes = 0 if self._copy is None else self._copy.extra_bytes
        self.able = WHOLE_ABLE if self._whole else SHARD_ABLE

    def refresh(self) -> None:
        if self._copy is not None:
            self._copy.refresh()

    def screens(self, B: int, largest_k: int) -> bool:
        if self._copy is None:
            return False
        hidden = self._copy.weight[:1].expand(B, -1)  # of which only the shape is read
        configs, _ = self._copy.choice(hidden, self._head.vocab_size, largest_k)
        return configs is not None

    def greedy(self, hidden: Tensor) -> Tensor:
        """int64 [B]: the likeliest token of each row of hidden [B, D]; 0 where there is none.

        The host does not wait: what captures it in a CUDA graph has called it before.
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
        weight, asked = self._head.weight, rows.asked
        same: dict[str, Any] = {
            "temperature": rows.temperature,
            "bias": rows.bias,
            "mask": rows.mask,
            "seed": rows.seed,
            "offset": rows.offset,
            "soft_cap": self._head.soft_cap,
            "vocab_size": self._head.vocab_size if self._whole else None,
            "noise": self._noise,
            "return_logprob": asked is not None,
            "return_rank": asked is not None and self._whole,
            "return_top": 0 if asked is None else asked.top,
        }
        if rows.filters is None and rows.penalties is None:
            sample = flash_sample(rows.hidden, self._copy or weight, **same)
            return DrawResult(sample.tokens, self._told(rows, sample))
        assert isinstance(weight, Tensor)
        of_kept = asked is not None and not asked.raw
        top_k, top_p, min_p = rows.filters or (0, 1.0, 0.0)
        cut = truncated_sample(
            rows.hidden,
            self._copy if rows.screened and self._copy is not None else weight,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            penalties=rows.penalties,
            return_kept=of_kept,
            return_kept_logprob=of_kept,
            logprob_temperature=None if asked is None or of_kept else 1.0,
            **same,
        )
        return DrawResult(cut.tokens, self._told(rows, among_kept(cut, rows) if of_kept else cut))

    def _told(self, rows: Rows, sample: Sample | TruncatedSample) -> Told | None:
        """What a draw tells, in vLLM's form."""
        if rows.asked is None or sample.logprob is None:
            return None
        tokens, logprob, rank = sample.tokens, sample.logprob, sample.rank
        top, top_logprob = sample.top_tokens, sample.top_logprob
        if rows.apart is not None:
            raw = self._apart(rows, tokens[rows.apart])
            parts = (logprob, rank, top, top_logprob)
            for part, own in zip(parts, raw, strict=True):
                if part is not None and own is not None:
                    part.index_copy_(0, rows.apart, own)
        ranks = (rows.temperature == 0).long() - 1 if rank is None else rank
        ids, logprobs = tokens.clamp(min=0)[:, None], logprob[:, None]
        if top is not None and top_logprob is not None:
            ids = torch.cat([ids, named(top)], 1)
            logprobs = torch.cat([logprobs, top_logprob], 1)
        return Told(ids, logprobs, ranks.long() + 1)

    def _apart(self, rows: Rows, tokens: Tensor) -> tuple[Tensor | None, ...]:
        """(log-probability, rank, top tokens, theirs) of drawn tokens [n] by the raw logits."""
        weight, asked = self._head.weight, rows.asked
        assert isinstance(weight, Tensor) and rows.apart is not None and asked is not None
        hidden, mask = rows.hidden[rows.apart], rows.mask
        same: dict[str, Any] = {
            "mask": None if mask is None else mask[rows.apart],
            "soft_cap": self._head.soft_cap,
            "vocab_size": self._head.vocab_size,
        }
        found = score(hidden, weight, tokens, return_rank=True, **same)
        if not asked.top:
            return found.logprob, found.rank, None, None
        top = flash_sample(hidden, weight, seed=rows.seed[:1], return_top=asked.top, **same)
        return found.logprob, found.rank, top.top_tokens, top.top_logprob


def among_kept(cut: TruncatedSample, rows: Rows) -> TruncatedSample:
    """The log-probabilities of a draw over what the filters keep; of a greedy row over all."""
    assert cut.logprob is not None and cut.kept_logprob is not None and cut.kept is not None
    greedy = rows.temperature == 0
    shift = (cut.kept_logprob - cut.logprob).masked_fill(greedy, 0.0)
    top = cut.top_logprob
    if top is not None:
        place = torch.arange(top.shape[1], device=top.device)
        gone = (place >= cut.kept[:, None]) & ~greedy[:, None]
        top = (top + shift[:, None]).masked_fill(gone, -torch.inf)
    return cut._replace(logprob=torch.where(greedy, cut.logprob, cut.kept_logprob), top_logprob=top)


def named(tokens: Tensor) -> Tensor:
    """Tokens int64 [B, n], with ids that are not among them in place of -1.

    Where there is a -1, all tokens but those of the row are forbidden; vLLM names some of them.
    """
    n = tokens.shape[1]
    ids = torch.arange(2 * n, device=tokens.device)
    taken = (tokens[:, :, None] == ids).any(1)
    return torch.where(tokens < 0, taken.int().argsort(dim=1, stable=True)[:, :n], tokens)


def history(prompt_bits: Tensor, counts: Tensor, capacity: int) -> TokenHistory:
    """A history of rows whose tokens are marked: nobody waits for the GPU.

    Args:
        prompt_bits: int32 [B, V / 32 or more], token v of the prompt in bit v % 32 of word v // 32.
        counts: int32 [B, V], of each token in the output.
        capacity: distinct tokens of a row, at most; no row may have more.
    """
    B, V = counts.shape
    tokens = torch.arange(V, device=counts.device)
    bits = prompt_bits[:, tokens // 32] >> (tokens % 32).to(torch.int32)
    seen = (bits & 1).bool() | (counts > 0)
    places = seen.cumsum(1)
    made = TokenHistory(B, capacity, counts.device)
    # Places from 1; what is not seen goes to place 0, which is cut off.
    target = torch.where(seen, places, 0)
    for field, values in (
        (made.tokens, tokens.to(torch.int32).expand(B, V)),
        (made.counts, counts),
    ):
        wide = torch.zeros(B, capacity + 1, dtype=torch.int32, device=counts.device)
        field.copy_(wide.scatter_(1, target, values)[:, 1:])
    made.lengths.copy_(places[:, -1])
    return made


class ProviderDraw:
    """See Draw. A sampler as `fsbench run` builds it, for comparison: rows at T = 1 and no more.

    Raises:
        InvalidArgument: the head is sharded or has a soft cap, which a Problem does not describe.
    """

    able, extra_bytes = Need(0), 0

    def __init__(self, provider: Provider, head: Head):
        if not isinstance(head.weight, torch.Tensor) or head.soft_cap is not None:
            raise InvalidArgument(
                f"{provider.name}: expected a whole LM head without a soft cap; only "
                f"{FLASH_SAMPLE} takes others"
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
        """See HeadDraw. What a rival makes of a weight when it is built stays as it was."""

    def _build(self, B: int) -> Launch:
        V, D = self._weight.shape
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        dtype = names[self._weight.dtype]
        return self._provider.build(
            Problem(B, D, V, dtype, device=self._weight.device.type), self._weight
        )
