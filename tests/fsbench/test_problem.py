"""Problem, the distributions of logits and the named LM heads."""

from __future__ import annotations

import math
import re

import pytest

from fsbench.errors import InvalidArgument
from fsbench.problem import Problem, model, models, parse_logits


@pytest.mark.parametrize("name", ["B", "D", "V", "tp"])
def test_sizes_are_positive_integers(name):
    for value in (0, -1, 1.0, "1", True, None):
        message = rf"^{name}: expected an integer >= 1; got {value!r}$"
        with pytest.raises(ValueError, match=message):
            Problem(**{"B": 1, "D": 2, "V": 3, name: value})


WRONG = [
    *(({"temperature": T}, "temperature: expected a finite number >= 0")
      for T in (-0.1, math.nan, math.inf, -math.inf)),
    ({"dtype": "bf61"}, "dtype: expected one of bf16, fp16, fp32; got 'bf61'; did you mean 'bf16'"),
    ({"device": "gpu"}, "device: expected one of cpu, cuda; got 'gpu'"),
    ({"logits": "uniform:1"}, "logits: expected normal:SIGMA, "),
    ({"top_k": -1}, "top_k: expected an integer >= 0 (0 is off); got -1"),
    ({"top_k": 1.5}, "top_k: expected an integer"),
    ({"top_k": True}, "top_k: expected an integer"),
    *(({"top_p": p}, "top_p: expected 0 < p <= 1 (1 is off); got") for p in (0.0, math.nan, 1.1)),
    *(({"min_p": p}, "min_p: expected 0 to 1 (0 is off); got") for p in (-0.1, math.nan)),
    ({"mixed": True}, "mixed: expected with top_k, top_p or min_p"),
    ({"repetition_penalty": 0.0, "history": 5}, "repetition_penalty: expected a number > 0"),
    ({"presence_penalty": math.nan, "history": 5}, "presence_penalty: expected a number"),
    ({"frequency_penalty": 0.1}, "history: expected tokens "),
    ({"history": 5}, "history: expected tokens "),
    ({"history": -1}, "history: expected an integer >= 0; got -1"),
    ({"weights": "int4"}, "weights: expected one of fp8, int8; got 'int4'; did you mean 'int8'"),
    ({"weights": "fp8", "tp": 2}, "weights: expected none with tp; got fp8"),
    ({"weights": "int8", "top_k": 2, "presence_penalty": 1.0, "history": 5},
     "weights: expected none with top_k, presence_penalty; got int8"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_wrong_field_is_named(changes, message):
    with pytest.raises(InvalidArgument, match="^" + re.escape(message)):
        Problem(1, 2, 3, **changes)


def test_logits_are_parsed_or_refused():
    assert parse_logits("normal:1") == ("normal", 1.0)
    assert parse_logits("zipf:1.25") == ("zipf", 1.25)
    assert parse_logits("peaked:0") == ("peaked", 0.0)
    for text in ("", "normal", "normal:", "normal:-1", "zipf:a", " normal:1", "normal:1:2"):
        with pytest.raises(InvalidArgument, match="logits: expected normal:SIGMA"):
            parse_logits(text)


def test_fields_are_the_columns_of_results():
    assert Problem(1, 2, 3, "fp16", 0.5, "cpu", "zipf:1").fields() == {
        **dict(b=1, d=2, v=3, dtype="fp16", temperature=0.5),
        **dict(device="cpu", logits="zipf:1", tp=1),
        **dict(top_k=0, top_p=1.0, min_p=0.0, mixed=False),
        **dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, history=0),
        "weights": "",
    }


def test_models():
    assert len(models()) >= 15
    assert (model("qwen3-8b").V, model("qwen3-8b").D) == (151936, 4096)
    assert (model("llama3-70b").V, model("llama3-70b").D) == (128256, 8192)
    for name, head in models().items():
        assert head.name == name
        Problem(1, head.D, head.V)
    with pytest.raises(InvalidArgument, match=r"^model: .*did you mean 'qwen3-8b'\?$"):
        model("qwen3_8b")


def test_histories_are_synthetic_and_repeat():
    problem = Problem(3, 16, 1000, repetition_penalty=1.1, frequency_penalty=0.5, history=401)
    assert problem.penalties == ("repetition_penalty", "frequency_penalty")
    assert str(problem).endswith("repetition_penalty=1.1 frequency_penalty=0.5 history=401")
    rows = problem.row_histories()
    assert rows == problem.row_histories() and rows[0] != rows[1]
    for prompt, output in rows:
        assert (len(prompt), len(output)) == (201, 200)
        assert min(prompt + output) >= 0 and max(prompt + output) < 1000
        assert 100 < len({*prompt, *output}) < 250, "words occur again"
    assert Problem(1, 2, 3).row_histories() == [([], [])]
