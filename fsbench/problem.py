"""`Problem`: the description of a decode step, and the named LM heads.

This module does not import torch: `fsbench list`, `iomodel` and `plot` use it.
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
"""Presets of `fsbench run` (fsbench.measure.presets); a sampler names those that include it."""

DEVICES = ("cuda", "cpu")

QUANTIZED = ("int8", "fp8")
"""One-byte forms of quantized heads; fp8 is e4m3."""

FILTERS = ("top_k", "top_p", "min_p")
"""Fields of Problem that may cut tokens off."""

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Fields of Problem that may change logits of tokens seen before -> their values when off."""

FILTER_ORDER = ("temperature", "min_p", "top_k", "top_p")
"""The order in which fsbench and vLLM apply them. Two positions matter: filters before top-p reduce
the mass that p is a part of, and filters before the temperature act on probabilities at T = 1."""

_LOGITS = re.compile(r"(normal|zipf|peaked):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Problem:
    """One decode step: draw a token for each of B rows from softmax(hidden @ weight.T / T).

    Attributes:
        B, D, V: hidden is [B, D] and weight [V, D].
        dtype: Type of both, one of DTYPES.
        temperature: 0 is greedy.
        device: One of DEVICES.
        logits: Distribution of the logits (docs/design/methodology.md, Inputs): `normal:S`,
            independent and normal with standard deviation S; `zipf:A`, -A log r for the token of
            rank r; `peaked:G`, one token G above all others.
        tp: Number of GPUs among which the vocabulary is split.
        top_k, top_p, min_p: Filters (fsbench.reference.truncate). top_k keeps the k likeliest
            tokens, 0 is off; top_p the fewest likeliest tokens with probability p together, 1 is
            off; min_p tokens of at least min_p times the largest probability, 0 is off.
        mixed: Whether only some rows have the filters (`row_filters`).
        repetition_penalty, presence_penalty, frequency_penalty: Penalties of all rows
            (fsbench.reference.penalized).
        history: Tokens of the synthetic history of each row (`row_histories`), for penalties.
        weights: Form of a quantized head, one of QUANTIZED, with a power of two as the scale of
            each row (fsbench.inputs.quantized); "" for a head of `dtype`. Only with tp = 1, without
            filters and penalties.

    Raises:
        InvalidArgument: A field is out of range; the message names it.
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
        others = [*self.filters, *self.penalties, *(["tp"] if self.tp > 1 else [])]
        if self.weights and others:
            names = ", ".join(others)
            raise InvalidArgument(f"weights: expected none with {names}; got {self.weights}")

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

        Ranks have a Zipf distribution with exponent 1, as words do, so tokens repeat; each row
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
        """Return (top_k, top_p, min_p) of each of B rows.

        In a mixed batch the rows take turns: all filters; top-k; top-p and min-p; none.
        """
        k, p, min_p = self.top_k, self.top_p, self.min_p
        turns = [(k, p, min_p), (k, 1.0, 0.0), (0, p, min_p), (0, 1.0, 0.0)]
        return [turns[row % 4 if self.mixed else 0] for row in range(self.B)]

    def row_targets(self) -> list[int]:
        """Return the token of each of B rows whose log-probability is requested, over all V."""
        return [(self.V - 1 - 7919 * row) % self.V for row in range(self.B)]

    def fields(self) -> dict[str, Any]:
        """Return column name -> value, as results store it (lower-case names)."""
        return {name.lower(): value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        named = (*self.filters, *self.penalties, *(("history",) if self.history else ()))
        options = "".join(f" {name}={getattr(self, name):g}" for name in named)
        weights = f" {self.weights} weights" if self.weights else ""
        return (
            f"B={self.B} D={self.D} V={self.V} {self.dtype} T={self.temperature:g} {self.logits}"
            f"{options}{' mixed' if self.mixed else ''}{weights}"
        )


def parse_logits(spec: str) -> tuple[str, float]:
    """Parse 'normal:1' to ('normal', 1.0); raise InvalidArgument for anything else."""
    match = _LOGITS.fullmatch(spec)
    if not match:
        raise InvalidArgument(
            f"logits: expected normal:SIGMA, zipf:EXPONENT or peaked:GAP; got {spec!r}"
        )
    return match[1], float(match[2])


@dataclass(frozen=True)
class Model:
    """An LM head of a released model: its name on the command line and its shape [V, D]."""

    name: str
    V: int
    D: int


@cache
def models() -> dict[str, Model]:
    """Return the named LM heads of models.toml, the only copy of these shapes."""
    text = (resources.files("fsbench") / "models.toml").read_text()
    return {name: Model(name, **shape) for name, shape in tomllib.loads(text).items()}


def model(name: str) -> Model:
    """Return the named LM head; raise InvalidArgument with the nearest name if it is unknown."""
    try:
        return models()[name]
    except KeyError:
        raise unknown_name("model", name, models(), "fsbench list") from None
