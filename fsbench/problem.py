"""`Problem`: the one description of what is sampled, and the named LM heads.

Nothing here imports torch: `fsbench list`, `iomodel` and `plot` use this module.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from random import Random
from typing import Any

from fsbench.errors import InvalidArgument, unknown_name

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Element types of hidden and weight, with their size in bytes."""

PRESETS = ("paper", "lean", "tp", "quick", "truncated", "score", "smoke", "cpu")
"""Presets of `fsbench run` (fsbench.measure.presets), of which a sampler names its own."""

DEVICES = ("cuda", "cpu")

QUANTIZED = ("int8", "fp8")
"""Forms of one byte that a head may have itself; fp8 is e4m3."""

FILTERS = ("top_k", "top_p", "min_p")
"""What may cut tokens off: fields of Problem."""

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What may change the logits of tokens seen before: fields of Problem, and where they are off."""

FILTER_ORDER = ("temperature", "min_p", "top_k", "top_p")
"""The order in which fsbench applies them, and vLLM too. Only two places in it matter: what comes
before top-p has a share in the mass that p is a part of, and what comes before the temperature acts
on probabilities at T = 1."""

_LOGITS = re.compile(r"(normal|zipf|peaked):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Problem:
    """One decode step: draw a token for each of B rows from softmax(hidden @ weight.T / T).

    hidden is [B, D] and weight [V, D], both `dtype`; temperature 0 means greedy.

    `logits` names the distribution of the logits (docs/design/methodology.md, Inputs):
    `normal:S` independent normal logits of standard deviation S; `zipf:A` the token of rank r has
    logit -A log r; `peaked:G` one token lies G above all others.

    Filters (fsbench.reference.truncate defines them): top_k keeps the k likeliest tokens, 0 is off;
    top_p the fewest likeliest of probability p together, 1 is off; min_p those of at least min_p
    times the largest probability, 0 is off. mixed: not every row has all of them (`row_filters`).

    Penalties (fsbench.reference.penalized), of all rows: on the tokens of a synthetic history of
    `history` tokens in each row (`row_histories`).

    weights: one of QUANTIZED, if the head is quantized itself, with a scale for each row that is a
    power of two (fsbench.inputs.quantized); "" if its numbers are of `dtype`. With one GPU, and
    neither filters nor penalties.
    """

    B: int
    D: int
    V: int
    dtype: str = "bf16"
    temperature: float = 1.0
    device: str = "cuda"
    logits: str = "normal:1"
    tp: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    mixed: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: int = 0
    weights: str = ""

    def __post_init__(self) -> None:
        for name in ("B", "D", "V", "tp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"{name}: expected an integer >= 1; got {value!r}")
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        if self.device not in DEVICES:
            raise unknown_name("device", self.device, DEVICES)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgument(
                f"temperature: expected a finite number >= 0 (0 is greedy); got {self.temperature}"
            )
        parse_logits(self.logits)
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise InvalidArgument(f"top_k: expected an integer >= 0 (0 is off); got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p: expected 0 < p <= 1 (1 is off); got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise InvalidArgument(f"min_p: expected 0 to 1 (0 is off); got {self.min_p}")
        if self.mixed and not self.filters:
            raise InvalidArgument("mixed: expected with top_k, top_p or min_p; got none of them")
        for name in PENALTIES:
            if not math.isfinite(getattr(self, name)):
                raise InvalidArgument(f"{name}: expected a number; got {getattr(self, name)}")
        if self.repetition_penalty <= 0:
            raise InvalidArgument(
                f"repetition_penalty: expected a number > 0 (1 is off); "
                f"got {self.repetition_penalty}"
            )
        if not isinstance(self.history, int) or isinstance(self.history, bool) or self.history < 0:
            raise InvalidArgument(f"history: expected an integer >= 0; got {self.history!r}")
        if bool(self.history) != bool(self.penalties):
            raise InvalidArgument(
                f"history: expected tokens if there are penalties, and only then; "
                f"got {self.history} with {', '.join(self.penalties) or 'no penalty'}"
            )
        if self.weights and self.weights not in QUANTIZED:
            raise unknown_name("weights", self.weights, QUANTIZED)
        beside = [*self.filters, *self.penalties, *(["tp"] if self.tp > 1 else [])]
        if self.weights and beside:
            raise InvalidArgument(
                f"weights: expected none with {', '.join(beside)}; got {self.weights}"
            )

    @property
    def filters(self) -> tuple[str, ...]:
        """Return the names of FILTERS that are on."""
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return tuple(name for name in FILTERS if getattr(self, name) != off[name])

    @property
    def penalties(self) -> tuple[str, ...]:
        """Return the names of PENALTIES that are on."""
        return tuple(name for name, off in PENALTIES.items() if getattr(self, name) != off)

    def row_histories(self) -> list[tuple[list[int], list[int]]]:
        """Return (prompt, output) of each of B rows: `history` token ids, most in the prompt.

        Ranks have a Zipf distribution with exponent 1, as words do, so many tokens repeat; each row
        has another token for a rank.
        """
        rows = []
        for row in range(self.B):
            random = Random(row)
            ranks = [int(self.V ** random.random()) - 1 for _ in range(self.history)]
            tokens = [(rank * 7919 + row * 104729) % self.V for rank in ranks]
            half = self.history - self.history // 2
            rows.append((tokens[:half], tokens[half:]))
        return rows

    def row_filters(self) -> list[tuple[int, float, float]]:
        """(top_k, top_p, min_p) of each of B rows.

        In a mixed batch the rows take turns: all filters; top-k alone; the others; none.
        """
        k, p, min_p = self.top_k, self.top_p, self.min_p
        turns = [(k, p, min_p), (k, 1.0, 0.0), (0, p, min_p), (0, 1.0, 0.0)]
        return [turns[row % 4 if self.mixed else 0] for row in range(self.B)]

    def row_targets(self) -> list[int]:
        """The token of each of B rows whose log-probability is asked for, over all V."""
        return [(self.V - 1 - 7919 * row) % self.V for row in range(self.B)]

    def fields(self) -> dict[str, Any]:
        """Column name -> value, as results store it (lower-case names)."""
        return {name.lower(): value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        named = (*self.filters, *self.penalties, *(("history",) if self.history else ()))
        kept = "".join(f" {name}={getattr(self, name):g}" for name in named)
        weights = f" {self.weights} weights" if self.weights else ""
        return (
            f"B={self.B} D={self.D} V={self.V} {self.dtype} T={self.temperature:g} {self.logits}"
            f"{kept}{' mixed' if self.mixed else ''}{weights}"
        )


def parse_logits(spec: str) -> tuple[str, float]:
    """'normal:1' -> ('normal', 1.0). Raises InvalidArgument for anything else."""
    match = _LOGITS.fullmatch(spec)
    if not match:
        raise InvalidArgument(
            f"logits: expected normal:SIGMA, zipf:EXPONENT or peaked:GAP; got {spec!r}"
        )
    return match[1], float(match[2])


@dataclass(frozen=True)
class Model:
    """An LM head in the wild: its name on the command line and its weight's shape [V, D]."""

    name: str
    V: int
    D: int


@cache
def models() -> dict[str, Model]:
    """The named LM heads, from models.toml: the only copy of these shapes."""
    text = (resources.files("fsbench") / "models.toml").read_text()
    return {name: Model(name, **shape) for name, shape in tomllib.loads(text).items()}


def model(name: str) -> Model:
    """The named LM head; an unknown name raises InvalidArgument with the nearest known one."""
    try:
        return models()[name]
    except KeyError:
        raise unknown_name("model", name, models(), "fsbench list") from None
