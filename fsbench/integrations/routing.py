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
    LOGPROB = auto()  # of the sampled token, in the distribution that it is drawn from
    OTHER_LOGPROB = auto()  # of the sampled token, in another distribution
    TOP_LOGPROBS = auto()  # of further tokens
    THINKING_BUDGET = auto()


REASONS = {
    Need.TEMPERATURE: "temperature",
    Need.MASK: "structured output",
    Need.BIAS: "logit bias",
    Need.FILTER: "top-k, top-p, min-p",
    Need.REPETITION: "repetition penalty",
    Need.LOGPROB: "logprobs",
    Need.OTHER_LOGPROB: "logprobs of another distribution",
    Need.TOP_LOGPROBS: "top logprobs",
    Need.THINKING_BUDGET: "thinking budget",
}
"""Need -> how counters call it."""


class Way(Enum):
    """Who draws a row."""

    FUSED = "flash_sample"
    FILTERED = "truncated_sample"
    PENALISED = "truncated_sample with penalties"
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
        a repetition penalty                   PENALISED
        top-k, top-p or min-p                  FILTERED
        a log-probability                      FUSED
        anything else, or nothing              FILTERED if the batch has a row there, else FUSED

    FUSED and FILTERED draw the same token for a row without a filter, so the last line saves a pass
    over the LM head and changes nothing. A request's token depends on no other request.
    """
    fused, filtered, penalised, engine = range(4)  # in the order of Way
    ways = np.full(len(needs), fused)
    ways[needs & Need.FILTER != 0] = filtered
    ways[needs & Need.REPETITION != 0] = penalised
    ways[needs & ~np.int64(able) != 0] = engine
    if (ways == filtered).any():
        ways[(ways == fused) & (needs & Need.LOGPROB == 0)] = filtered
    rows = [np.flatnonzero(ways == number) for number in range(4)]
    return [Group(way, mine) for way, mine in zip(Way, rows, strict=True) if len(mine)]


def reason(need: int, able: Need) -> str:
    """Why a row is left to the engine: the last of its needs that `able` lacks."""
    return REASONS[Need(1 << (int(need) & ~int(able)).bit_length() - 1)]


def logprob_needs(
    needs: np.ndarray, temperature: np.ndarray, asked: np.ndarray, mode: str
) -> np.ndarray:
    """What log-probabilities add to the needs of each row, int [B].

    asked: -1 none, 0 those of the sampled token, above also of others. mode: vLLM's logprobs_mode.
    flash_sample tells log softmax(logits / T + bias) under the mask, and that of T = 1 if T is 0:

        raw_logprobs        (after the mask, before all else) ours at T 0 or 1 without other needs
        processed_logprobs  (of what is drawn from)           ours without filters and repetition
        any other mode      (logits)                          never ours
    """
    changed = Need.FILTER | Need.REPETITION
    if mode == "raw_logprobs":
        same = (needs & (changed | Need.BIAS) == 0) & ((temperature == 0) | (temperature == 1))
    elif mode == "processed_logprobs":
        same = needs & changed == 0
    else:
        same = np.zeros(len(needs), bool)
    sampled = np.where(same, Need.LOGPROB, Need.OTHER_LOGPROB)
    return np.select([asked < 0, asked == 0], [0, sampled], Need.TOP_LOGPROBS)
