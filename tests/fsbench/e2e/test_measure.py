"""The runs of a batch size are made again where what a sampler saves differs too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsbench.e2e.measure import DecodePlan, measure
from fsbench.e2e.models import decoder
from fsbench.e2e.records import Decoded, StepStore, read
from fsbench.e2e.summary import summary

CALM, NOISY = (1000.0, 1001.0, 999.0), (1000.0, 1200.0, 800.0)


class Scripted:
    """An Engine and its Session: `fast` takes 900 us per token, `own` the times of each attempt."""

    name, device, gpu = "vllm", "cuda", "NVIDIA H200"

    def __init__(self, *attempts: tuple[float, ...]):
        self.times = [us for times in attempts for us in times]

    def label(self, sampler):
        return sampler, False

    def unavailable_reason(self, sampler):
        return None

    def open(self, *_):
        return self

    def prepare(self, *_):
        pass

    def decode(self, sampler, B, requests):
        us = self.times.pop(0) if sampler == "own" else 900.0
        return Decoded(8, 8, 1.0, us, [us])

    def profile(self, *_):
        pass

    def counts(self, sampler):
        pass

    def close(self):
        pass


def measured(
    folder: Path, attempts: int, *times: tuple[float, ...]
) -> tuple[int, float, list[str]]:
    """Return (runs of the baseline that were made, percent saved, what was said)."""
    messages: list[str] = []
    plan = DecodePlan((decoder("tiny"),), (1,), ("own", "fast"), runs=3, attempts=attempts)
    store = StepStore(folder, {})
    engine = Scripted(*times)
    assert measure(plan, engine, store, messages.append) == 0 and not engine.times
    lines = read(folder)
    made = sum("decoded" in line and line["case"]["sampler"] == "own" for line in lines)
    row = summary(lines).set_index("sampler").loc["fast"]
    assert row["runs"] == 3
    return made, row["reduction_pct"], messages


@pytest.mark.parametrize(
    ("attempts", "times", "made"),
    [
        (3, [CALM], 3),
        (3, [NOISY, CALM], 6),
        (3, [NOISY, NOISY, NOISY], 9),
        (1, [NOISY], 3),
    ],
)
def test_noisy_runs_are_made_again_and_the_last_count(tmp_path, attempts, times, made):
    runs, percent, messages = measured(tmp_path / "run", attempts, *times)
    assert runs == made and percent == pytest.approx(10.0)
    reasons = [text for text in messages if "what fast saves differs by more than 2 points" in text]
    assert len(reasons) == len(times) - 1
    frame = summary(read(tmp_path / "run")).set_index("sampler")
    assert (frame.reduction_sd_pct["fast"] > 2) == (times[-1] is NOISY)


def test_a_call_that_is_killed_while_it_repeats_runs_leaves_those_of_one_attempt(
    tmp_path, monkeypatch
):
    engine = Scripted(NOISY, CALM[:2])
    decode = engine.decode

    def killed(*arguments):
        if not engine.times:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(engine, "decode", killed)
    plan = DecodePlan((decoder("tiny"),), (1,), ("own", "fast"), runs=3, attempts=3)
    store = StepStore(tmp_path / "run", {})
    with pytest.raises(KeyboardInterrupt):
        measure(plan, engine, store)
    store.close()
    kept = [line for line in read(tmp_path / "run") if line["case"]["sampler"] == "own"]
    assert [line["decoded"]["tpot_us"] for line in kept] == [*NOISY]


def test_without_its_baseline_a_sampler_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Scripted, "unavailable_reason", lambda self, name: "not here" if name == "own" else None
    )
    plan = DecodePlan((decoder("tiny"),), (1,), ("own", "fast"), runs=3, attempts=3)
    store = StepStore(tmp_path / "run", {})
    measure(plan, Scripted(), store)
    lines = read(tmp_path / "run")
    assert sum("decoded" in line for line in lines) == 3
