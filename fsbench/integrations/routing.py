"""Which rows of a batch are drawn together, by whom, and which are left to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntFlag, auto

import numpy as np


class Need(IntFlag):
    """What a request asks of a sampler beyond a draw at T = 1. It never changes with the batch."""

    TEMPERATURE = auto()  # other than 1; greedy is 0
    MASK = auto()  # a grammar's bits
    BIAS = auto()  # what adds to logits or forbids tokens, at rows of the request's own
    FILTER = auto()  # top-k, top-p, min-p
    REPETITION = auto()  # a penalty that depends on the sign of a logit
    LOGPROB = auto()  # of the sampled token
    OTHER_LOGPROB = auto()  # in another distribution than that which is drawn from
    TOP_LOGPROBS = auto()  # of up to MOST_LOGPROBS of the likeliest tokens, too
    MORE_LOGPROBS = auto()  # of more of them, or of given tokens: those are told by the engine
    LOGITS = auto()  # in place of log-probabilities


MOST_LOGPROBS = 20
"""Of so many tokens a draw can tell log-probabilities."""

REASONS = {
    Need.TEMPERATURE: "temperature",
    Need.MASK: "structured output",
    Need.BIAS: "logit bias",
    Need.FILTER: "top-k, top-p, min-p",
    Need.REPETITION: "repetition penalty",
    Need.LOGPROB: "logprobs",
    Need.OTHER_LOGPROB: "logprobs of another distribution",
    Need.TOP_LOGPROBS: "top logprobs",
    Need.MORE_LOGPROBS: "many logprobs",
    Need.LOGITS: "logits",
}
"""Need -> how counters call it."""

SHARD_ABLE = Need.TEMPERATURE | Need.MASK | Need.BIAS | Need.LOGPROB | Need.MORE_LOGPROBS
"""What flash_sample can do over one rank's rows of an LM head."""
WHOLE_ABLE = SHARD_ABLE | Need.FILTER | Need.REPETITION | Need.OTHER_LOGPROB | Need.TOP_LOGPROBS
"""What flash_sample and truncated_sample can do over a whole LM head."""


class Way(Enum):
    """Who draws a row."""

    FUSED = "flash_sample"
    FILTERED = "truncated_sample"
    PENALIZED = "truncated_sample with penalties"
    ENGINE = "the engine"


@dataclass(frozen=True)
class Group:
    """Rows of a batch that are drawn together. rows: numbers in the batch, ascending."""

    way: Way
    rows: np.ndarray


def route(needs: np.ndarray, able: Need) -> list[Group]:
    """The groups of a batch, each row in one of them. needs: Need of each row, int [B].

    able: what the sampler can do. Each row is decided for itself; the first line that fits counts:

        the row needs                          it is drawn by
        something that `able` lacks            ENGINE
        a repetition penalty                   PENALIZED
        top-k, top-p or min-p                  FILTERED
        log-probabilities of what is not       FILTERED
          drawn from
        anything else, or nothing              FILTERED if the batch has a row there, else FUSED

    FUSED and FILTERED draw the same token for a row without a filter, so the last line saves a pass
    over the LM head and changes nothing. A request's token depends on no other request.
    """
    fused, filtered, penalized, engine = range(4)  # in the order of Way
    ways = np.full(len(needs), fused)
    ways[needs & (Need.FILTER | Need.OTHER_LOGPROB) != 0] = filtered
    ways[needs & Need.REPETITION != 0] = penalized
    ways[needs & ~np.int64(able) != 0] = engine
    if (ways == filtered).any():
        ways[ways == fused] = filtered
    rows = [np.flatnonzero(ways == number) for number in range(4)]
    return [Group(way, mine) for way, mine in zip(Way, rows, strict=True) if len(mine)]


def shared_out(needs: np.ndarray, able: Need) -> np.ndarray:
    """The needs, with log-probabilities that a draw cannot tell left to the engine if it can."""
    if Need.TOP_LOGPROBS in able or Need.MORE_LOGPROBS not in able:
        return needs
    rest = needs & ~np.int64(Need.TOP_LOGPROBS)
    return np.where(needs == rest, needs, rest | Need.MORE_LOGPROBS)


def reason(need: int, able: Need) -> str:
    """Why a row is left to the engine: the last of its needs that `able` lacks."""
    return REASONS[Need(1 << (int(need) & ~int(able)).bit_length() - 1)]


def logprob_needs(
    needs: np.ndarray, temperature: np.ndarray, asked: np.ndarray, mode: str
) -> np.ndarray:
    """What log-probabilities add to the needs of each row, int [B].

    asked: -1 none, 0 those of the sampled token, above also of as many others, the likeliest.
    mode: vLLM's logprobs_mode:

        raw_logprobs        of softmax(logits) after a grammar's mask, before all else; what is
                            drawn from is that at T = 1, or 0, without other needs
        processed_logprobs  of what is drawn from, at T = 1 if T is 0
        any other mode      no log-probabilities, but logits
    """
    changed = Need.FILTER | Need.REPETITION | Need.BIAS
    same = (needs & changed == 0) & ((temperature == 0) | (temperature == 1))
    found = np.full(len(needs), Need.LOGPROB)
    if mode == "raw_logprobs":
        found |= np.where(same, 0, Need.OTHER_LOGPROB)
    elif mode != "processed_logprobs":
        found |= Need.LOGITS
    others = np.where(asked > MOST_LOGPROBS, Need.MORE_LOGPROBS, Need.TOP_LOGPROBS)
    return np.select([asked < 0, asked == 0], [0, found], found | others)
