"""Group the rows of a batch by the sampler that draws them: one of ours, or the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntFlag, auto

import numpy as np

FLASH_SAMPLE, SCREENED = "flash_sample", "screened"
"""Samplers that serve requests of every kind."""


class Need(IntFlag):
    """A feature that a request needs beyond a draw at T = 1; it does not depend on the batch."""

    TEMPERATURE = auto()  # other than 1; greedy is 0
    MASK = auto()  # a grammar's bits
    BIAS = auto()  # added to logits, or forbids tokens; per request
    FILTER = auto()  # top-k, top-p, min-p
    REPETITION = auto()  # a penalty that depends on the sign of a logit
    LOGPROB = auto()  # of the sampled token
    OTHER_LOGPROB = auto()  # in another distribution than the sampled one
    TOP_LOGPROBS = auto()  # also of up to MOST_LOGPROBS of the most likely tokens
    MORE_LOGPROBS = auto()  # of more tokens, or of specified ones: the engine computes these
    LOGITS = auto()  # in place of log-probabilities


MOST_LOGPROBS = 20
"""Largest number of most likely tokens whose log-probabilities a draw returns."""

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
"""Need -> its name in the counters."""

SHARDED_HEAD_NEEDS = Need.TEMPERATURE | Need.MASK | Need.BIAS | Need.LOGPROB | Need.MORE_LOGPROBS
"""Needs that flash_sample meets over one rank's rows of an LM head."""
WHOLE_HEAD_NEEDS = (
    SHARDED_HEAD_NEEDS | Need.FILTER | Need.REPETITION | Need.OTHER_LOGPROB | Need.TOP_LOGPROBS
)
"""Needs that flash_sample and truncated_sample meet over a whole LM head."""


class Route(Enum):
    """The sampler of a row."""

    FUSED = "flash_sample"
    FILTERED = "truncated_sample"
    PENALIZED = "truncated_sample with penalties"
    ENGINE = "the engine"


@dataclass(frozen=True)
class Group:
    """Rows of a batch that are drawn together.

    Attributes:
        rows: int64 indices into the batch, ascending.
    """

    route: Route
    rows: np.ndarray


def group_rows(needs: np.ndarray, supported: Need) -> list[Group]:
    """Assign each row of a batch to a group.

    The first line that matches decides:

        the row needs                          its route
        something that is not supported        ENGINE
        a repetition penalty                   PENALIZED
        top-k, top-p or min-p                  FILTERED
        log-probabilities in another           FILTERED
          distribution than the sampled one
        anything else, or nothing              FILTERED if the batch has a row there, else FUSED

    FUSED and FILTERED draw the same token for a row without a filter, so the last line saves a pass
    over the LM head and changes no token. A request's token depends on no other request.

    Args:
        needs: int [B], the Need of each row.
        supported: what the sampler can do.
    """
    fused, filtered, penalized, engine = range(4)  # in the order of Route
    routes = np.full(len(needs), fused)
    routes[needs & (Need.FILTER | Need.OTHER_LOGPROB) != 0] = filtered
    routes[needs & Need.REPETITION != 0] = penalized
    routes[needs & ~np.int64(supported) != 0] = engine
    if (routes == filtered).any():
        routes[routes == fused] = filtered
    rows = [np.flatnonzero(routes == number) for number in range(4)]
    return [
        Group(route, members) for route, members in zip(Route, rows, strict=True) if len(members)
    ]


def delegate_logprobs(needs: np.ndarray, supported: Need) -> np.ndarray:
    """Replace TOP_LOGPROBS by MORE_LOGPROBS, which the engine computes, if only that is supported.

    Args:
        needs: int64 [B], the Need of each row.
    """
    if Need.TOP_LOGPROBS in supported or Need.MORE_LOGPROBS not in supported:
        return needs
    others = needs & ~np.int64(Need.TOP_LOGPROBS)
    return np.where(needs == others, needs, others | Need.MORE_LOGPROBS)


def reason(need: int, supported: Need) -> str:
    """Return why a row is left to the engine: the last of its needs that is not supported."""
    return REASONS[Need(1 << (int(need) & ~int(supported)).bit_length() - 1)]


def logprob_needs(
    needs: np.ndarray, temperature: np.ndarray, num_logprobs: np.ndarray, mode: str
) -> np.ndarray:
    """Return what log-probabilities add to the needs of each row, int [B].

    Args:
        needs: int [B], the other needs of each row.
        temperature: fp32 [B].
        num_logprobs: int [B]; -1 nothing, 0 the sampled token alone, n > 0 also the n most likely.
        mode: vLLM's logprobs_mode.

            raw_logprobs        of softmax(logits) after a grammar's mask and before anything else:
                                the sampled distribution at T = 1 or 0, without other needs
            processed_logprobs  of the sampled distribution, at T = 1 if T is 0
            any other mode      logits in place of log-probabilities
    """
    changed = Need.FILTER | Need.REPETITION | Need.BIAS
    unchanged = (needs & changed == 0) & ((temperature == 0) | (temperature == 1))
    sampled = np.full(len(needs), Need.LOGPROB)
    if mode == "raw_logprobs":
        sampled |= np.where(unchanged, 0, Need.OTHER_LOGPROB)
    elif mode != "processed_logprobs":
        sampled |= Need.LOGITS
    others = np.where(num_logprobs > MOST_LOGPROBS, Need.MORE_LOGPROBS, Need.TOP_LOGPROBS)
    return np.select([num_logprobs < 0, num_logprobs == 0], [0, sampled], sampled | others)
