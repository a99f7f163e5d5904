"""Facts from public tests of other samplers: logits, filters, and the tokens that are kept.

Each case names its peer and the test it is from. Only numbers are copied. Cases of samplers that
fsbench lacks (tail-free, typical, eta and epsilon sampling, a minimum of kept tokens) are not
included, and neither are deliberate differences: a token of logit -inf is never kept nor counted.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max


class Kept(NamedTuple):
    """One row of logits [V], the filters in their order, and the tokens that these keep."""

    source: str
    logits: Tensor
    filters: dict[str, Any]
    tokens: list[int]
    order: tuple[str, ...] = ("temperature", "min_p", "top_k", "top_p")


class Penalized(NamedTuple):
    """One row of logits before penalties and after; or probabilities, if `of_softmax`."""

    source: str
    logits: Tensor
    prompt: list[int]
    output: list[int]
    amounts: dict[str, float]
    expected: list[float]
    of_softmax: bool = False


def log(*p: float) -> Tensor:
    return torch.tensor(p, dtype=torch.float32).log()


def llama_cpp() -> list[Kept]:
    """its sampling test: test_top_k, test_top_p, test_min_p."""
    logits = log(0.1, 0.2, 0.3, 0.4)
    counts = {
        "top_k": [(1, 1), (3, 3)],
        "top_p": [(0.0, 1), (0.7, 2), (0.8, 3), (1.0, 4)],
        "min_p": [(0.0, 4), (0.24, 4), (0.26, 3), (0.49, 3), (0.51, 2), (0.74, 2), (0.76, 1)],
    }
    counts["min_p"].append((1.0, 1))
    return [
        Kept(f"llama.cpp {name}={value}", logits, {name: value}, list(range(4 - n, 4)))
        for name, cases in counts.items()
        for value, n in cases
    ]


QUEUES = [
    *("k 1 1 1", "p 10000 0 1", "k 100 1 1", "p 10000 .0002 1", "p 10000 .8 1", "m 10000 1 .1"),
    *("m 10000 1 .99989", "mp 100 .8 .99989"),
    *(f"{order} 100 .8 .1" for order in ("kp", "km", "pk", "pm", "mk", "mp")),
    *(f"{order} 100 .8 .1" for order in ("kpm", "kmp", "pkm", "pmk", "mkp", "mpk")),
]
"""Stages, and k, p and min-p: a sampler queue of its sampling test, of 10,000 tokens."""


def llama_cpp_queues() -> list[Kept]:
    """test_sampler_queue: token v has weight v, so sums of weights are whole numbers."""
    n = 10_000
    logits = torch.arange(n, dtype=torch.float32).log()
    facts = []
    for queue in QUEUES:
        stages, *numbers = queue.split()
        k, p, min_p = int(numbers[0]), float(numbers[1]), float(numbers[2])
        first = 1  # the lowest token that is kept
        filters: dict[str, Any] = {}
        for stage in stages:
            if stage == "k":
                first, filters["top_k"] = max(first, n - k), k
            elif stage == "m":
                first, filters["min_p"] = max(first, math.ceil(min_p * (n - 1))), min_p
            else:
                target = p * sum(range(first, n))
                last, mass = n, 0
                while last > first and (mass < target or last == n):
                    last -= 1
                    mass += last
                first, filters["top_p"] = last, p
        names = {"k": "top_k", "p": "top_p", "m": "min_p"}
        order = ("temperature", *(names[stage] for stage in stages))
        facts.append(Kept(f"llama.cpp {queue}", logits, filters, list(range(first, n)), order))
    return facts


def transformers() -> list[Kept]:
    """its test of logits processors: the top-k, top-p and min-p warpers."""
    ramp = torch.arange(10.0)
    turned = ramp.clone()
    turned[:5] += 10
    two = [log(0.3, 0.1, 0.1, 0.5), log(0.15, 0.3, 0.3, 0.25)]
    rows = [
        (ramp, {"top_k": 3}, [7, 8, 9]),
        (turned, {"top_k": 3}, [2, 3, 4]),
        (two[0], {"top_p": 0.8}, [0, 3]),
        (two[1], {"top_p": 0.8}, [1, 2, 3]),
        (ramp - 5, {"top_p": 0.9}, [7, 8, 9]),
        (log(0.9, 0.0274, 0.047, 0.0274), {"min_p": 0.05}, [0, 2]),
        (two[1], {"min_p": 0.05}, [0, 1, 2, 3]),
        (log(0.97, 0.01, 0.01, 0.01), {"min_p": 0.05}, [0]),
    ]
    return [Kept(f"transformers {i} {row[1]}", *row) for i, row in enumerate(rows)]


def tensorrt_llm() -> list[Kept]:
    """topKSamplingLayerTest, topPSamplingLayerTest, four steps."""
    some = [-0.9163, -1.2040, -1.6094, -2.3026]
    facts = []
    for step, first in enumerate((4, 0, 2, 0)):
        logits = torch.full((8,), -FLT_MAX)
        logits[first : first + 4] = torch.tensor(some)
        cases: list[tuple[dict[str, Any], int]] = [
            ({"top_k": 2}, 2),
            ({"top_k": 1}, 1),
            ({"top_k": 2, "top_p": 0.3}, 1),
            ({"top_k": 1, "top_p": 0.3}, 1),
            ({"top_p": 0.3}, 1),
            ({"top_p": 0.5}, 2),
            ({"top_p": 0.8}, 3),
        ]
        for filters, n in cases:
            tokens = list(range(first, first + n))
            facts.append(Kept(f"TensorRT-LLM step {step} {filters}", logits, filters, tokens))
    return facts


def flashinfer() -> list[Kept]:
    """its sampling test: the masks that samples are held to, of random probabilities."""
    generator = torch.Generator().manual_seed(42)
    p = torch.rand(111, generator=generator)
    p /= p.sum()
    down, order = p.double().sort(descending=True)
    facts = []

    def add(n: int, **filters: Any) -> None:
        tokens = sorted(order[:n].tolist())
        facts.append(Kept(f"FlashInfer {filters}", p.log(), filters, tokens))

    above = down.cumsum(0) - down
    for part in (0.1, 0.5, 0.9):  # cdf from below > 1 - p
        add(int((above < part).sum()), top_p=part)
    for k in (10, 100):
        add(k, top_k=k)
    for part in (0.05, 0.1, 0.2, 0.7, 1.0):
        add(int((down >= part * down[0]).sum()), min_p=part)
    for part, k in ((0.1, 55), (0.5, 11)):  # the joint order: of all probabilities
        n = min(k, int((above < part).sum()))
        filters = {"top_k": k, "top_p": part}
        source = f"FlashInfer joint {filters}"
        joint = ("temperature", "top_p", "top_k")
        facts.append(Kept(source, p.log(), filters, sorted(order[:n].tolist()), joint))
    return facts


def flashsampling() -> list[Kept]:
    """its core test: test_top_k_top_p, of logits that ascend or descend; greedy decoding."""
    facts = []
    for V in (100, 200, 256):
        for down in (False, True):
            logits = torch.arange(V, dtype=torch.float32)
            logits = logits.flip(0) if down else logits
            kept = logits.topk(10)
            p = kept.values.softmax(0)
            tokens = sorted(kept.indices[p.cumsum(0) - p < 0.9].tolist())
            name = f"FlashSampling V={V} {'down' if down else 'up'}"
            facts.append(Kept(f"{name} k", logits, {"top_k": 10, "top_p": 0.9}, tokens))
            facts.append(
                Kept(f"{name} greedy", logits, {"temperature": 0.0}, [int(logits.argmax())])
            )
    return facts


def penalties() -> list[Penalized]:
    facts = []
    fifth = log(*[0.2] * 5)
    of_llama = [  # its sampling test: test_penalties; (seen, repetition, both others, result)
        ([0], 50.0, 0.0, [0, 0.25, 0.25, 0.25, 0.25]),
        ([0, 1, 2], 50.0, 0.0, [0, 0, 0, 0.5, 0.5]),
        ([0, 1, 2, 0, 0], 50.0, 0.0, [0, 0, 0, 0.5, 0.5]),
        ([0], 1.0, 5.0, [0.000011, 0.249997, 0.249997, 0.249997, 0.249997]),
        ([0, 1, 2], 1.0, 5.0, [0.000023, 0.000023, 0.000023, 0.499966, 0.499966]),
        ([0, 1, 2, 0, 0], 1.0, 5.0, [0.0, 0.000023, 0.000023, 0.499977, 0.499977]),
    ]
    for seen, repetition, other, expected in of_llama:
        amounts = {"repetition": repetition, "frequency": other, "presence": other}
        source = f"llama.cpp penalties {seen} {repetition} {other}"
        facts.append(Penalized(source, fifth, [], seen, amounts, expected, True))
    tenth = torch.full((10,), 0.1)  # transformers: test_repetition_penalty_dist_process
    for token, y, ids in ((0, -0.1, [0, 1]), (5, 0.4, [5, 0])):
        logits = tenth.clone()
        logits[token] = y
        expected = logits.tolist()
        for i in ids:
            expected[i] = expected[i] * 2 if expected[i] < 0 else expected[i] / 2
        amounts = {"repetition": 2.0}
        facts.append(Penalized(f"transformers {ids}", logits, ids, [], amounts, expected))
    for f in (0.12, -0.12):  # SGLang: penaltylib's test of frequencies; token i was drawn i times
        expected = [1.0, 1.0 - f, 1.0 - 2 * f, 1.0, 1.0]
        amounts = {"frequency": f}
        facts.append(Penalized(f"SGLang {f}", torch.ones(5), [], [1, 2, 2], amounts, expected))
    return facts


class Preferred(NamedTuple):
    """Equal logits and penalties: which kind of token has the largest logit, and which the least.

    vLLM's test of its sampler. Kinds: "new", "prompt", "once" and "thrice" drawn.
    """

    name: str
    amounts: dict[str, float]
    largest: set[str]
    least: set[str]


VLLM = [
    Preferred("presence 2", {"presence": 2.0}, {"new", "prompt"}, {"once", "thrice"}),
    Preferred("presence -2", {"presence": -2.0}, {"once", "thrice"}, {"new", "prompt"}),
    Preferred("frequency 2", {"frequency": 2.0}, {"new", "prompt"}, {"thrice"}),
    Preferred("frequency -2", {"frequency": -2.0}, {"thrice"}, {"new", "prompt"}),
    Preferred("repetition .1", {"repetition": 0.1}, {"prompt", "once", "thrice"}, {"new"}),
    Preferred("repetition 1.9", {"repetition": 1.9}, {"new"}, {"prompt", "once", "thrice"}),
]

KEPT = [
    *llama_cpp(),
    *llama_cpp_queues(),
    *transformers(),
    *tensorrt_llm(),
    *flashinfer(),
    *flashsampling(),
]
