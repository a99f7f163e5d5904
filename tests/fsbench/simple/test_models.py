"""The model of text, the share that hot tokens cover, the sizing model and the pipeline model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsbench.errors import InvalidArgument
from fsbench.simple import hot
from fsbench.simple.hot import Coverage
from fsbench.simple.pipeline import Sampling, steady_state
from fsbench.simple.sizing import Cost, best, expected_us, fit
from fsbench.simple.zipf import ZipfText

V = 2000
TEXT = ZipfText(V, knee=200)


# The model of text


def test_distributions_and_rows_sum_to_one():
    for document in (0, 65):
        p = TEXT.distribution(document)
        assert p.shape == (V,) and (p > 0).all() and p.sum() == pytest.approx(1)
    logits = TEXT.logits(5, first=3)
    assert logits.shape == (5, V)
    assert torch.allclose(logits.double().exp().sum(1), torch.ones(5).double(), atol=1e-5)


def test_the_common_distribution_is_zipfs():
    p = np.sort(ZipfText(V, knee=200, topic_share=0.0).distribution(0))[::-1]
    assert p[0] / p[99] == pytest.approx(100)
    assert p[199] / p[399] == pytest.approx(4)  # exponent 2 beyond the knee


def test_text_is_a_function_of_the_seed():
    same, other = ZipfText(V, knee=200), ZipfText(V, 1, knee=200)
    assert np.array_equal(TEXT.trace(range(3), 50), same.trace(range(3), 50))
    assert not np.array_equal(TEXT.trace(range(3), 50), other.trace(range(3), 50))
    assert torch.equal(TEXT.logits(2), same.logits(2))


def test_tokens_of_a_document_have_its_distribution():
    counts = np.bincount(TEXT.trace(range(7, 8), 200_000)[0], minlength=V)
    p = TEXT.distribution(7)
    top = p.argsort()[-20:]
    z = (counts[top] - 200_000 * p[top]) / np.sqrt(200_000 * p[top])
    assert np.abs(z).max() < 5


def test_the_hot_mass_of_steps_is_that_of_their_document_on_average():
    one_topic = ZipfText(V, knee=200, topics=1)
    few = one_topic.distribution(0).argsort()[-100:]
    rows = one_topic.logits(500).double().exp()[:, torch.from_numpy(few.copy())].sum(1)
    error = float(rows.std()) / 500**0.5
    assert abs(float(rows.mean()) - one_topic.distribution(0)[few].sum()) < 5 * error


# Hot tokens


def test_coverage_of_a_trace_worked_out_by_hand():
    assert hot.order_of(np.array([[3, 3, 1, 4, 1, 3]]), 6).tolist() == [3, 1, 4, 0, 2, 5]
    order = np.array([3, 1, 4, 0, 2, *range(5, 40)])
    cover = hot.coverage(order, np.array([[3, 3, 1, 0], [39, 39, 39, 3]]), grid=2)
    assert cover.sizes.tolist() == [16, 40]
    assert cover.mean.tolist() == [(1 + 1 / 4) / 2, 1]


def test_coverage_is_monotone_and_has_its_slope():
    counted, held_out = hot.halves(TEXT.trace(range(64), 256))
    cover = hot.coverage(hot.order_of(counted, V), held_out)
    share = cover.share(np.arange(0, V + 1))
    assert share[0] == 0 and share[-1] == pytest.approx(1) and (np.diff(share) >= -1e-12).all()
    H = np.array([20.5, 333.3, 1500.5])
    numeric = (cover.share(H + 1e-4) - cover.share(H - 1e-4)) / 2e-4
    assert cover.slope(H) == pytest.approx(numeric, rel=1e-4)


@pytest.mark.parametrize(("documents", "halves"), [(4, (0, 2, 1, 3)), (1, (0, 1))])
def test_halves_are_disjoint(documents, halves):
    rows = np.arange(12).reshape(4, 3) if documents == 4 else np.arange(6).reshape(1, 6)
    both = [*hot.halves(rows)[0], *hot.halves(rows)[1]]
    parts = rows if documents == 4 else rows.reshape(2, 3)
    assert [part.tolist() for part in both] == [parts[i].tolist() for i in halves]


def test_traces_are_read(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1, 2], [3, 4]]))
    (tmp_path / "b.txt").write_text("1 2 9\n\n3 4\n")
    for name in ("a.npy", "b.txt"):
        assert hot.read_trace(tmp_path / name, 10).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "expected token ids, a document per row"),
        ("1 10\n", r"expected ids in \[0, 10\)"),
        ("one two\n", "could not be read|string or file|could not convert"),
    ],
)
def test_a_file_without_a_trace_is_refused(tmp_path, content, message):
    path = tmp_path / "trace.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidArgument, match=message):
        hot.read_trace(path, 10)


# The number of hot tokens

SIZES = np.unique(np.geomspace(16, 20_000, 24).round())
COVER = Coverage(20_000, SIZES, np.log1p(SIZES) / np.log1p(20_000))
COST = Cost(0.001, 2.0, (0.001, 0.001), (2.0, 2.0))


def test_the_fit_recovers_the_line_and_its_interval():
    H = np.geomspace(256, 100_000, 12)
    noise = np.random.default_rng(0).standard_normal((12, 200))
    cost = fit(H, (1.5 + 3e-4 * H)[:, None] * (1 + 0.02 * noise), resamples=200)
    assert cost.c_us == pytest.approx(3e-4, rel=0.01)
    assert cost.c0_us == pytest.approx(1.5, rel=0.02)
    assert cost.c_interval_us[0] < 3e-4 < cost.c_interval_us[1]
    assert cost.c0_interval_us[0] < 1.5 < cost.c0_interval_us[1]


def test_small_scans_count_as_much_as_large_ones():
    """A largest H that is off by 20 % (another cache) moves c0 by little."""
    H = np.geomspace(256, 100_000, 12)
    times = np.repeat((1.5 + 3e-4 * H)[:, None], 5, 1)
    times[-1] *= 1.2
    assert fit(H, times, 10).c0_us == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize(("both", "expected"), [(False, 101), (True, 121)])
def test_the_expected_cost_by_hand_and_its_minimum(both, expected):
    """1 + 2 (0.8 50 + 0.2 50), and 1 + 2 (50 + 0.2 50)."""
    cover = Coverage(100, np.array([50.0, 100.0]), np.array([0.8, 1.0]))
    cost = Cost(2.0, 1.0, (2.0, 2.0), (1.0, 1.0))
    assert expected_us(50.0, cover, cost, both) == pytest.approx(expected)
    optimum = best(COVER, COST, both)
    F = expected_us(np.arange(1, COVER.V + 1), COVER, COST, both)
    assert F[optimum.H - 1] == F.min() == optimum.cost_us
    assert optimum.root == pytest.approx(optimum.H, abs=1)


# The pipeline

LAST = Sampling("last stage", on_stage_us=50)
CPUS = Sampling("CPUs", beside_us=(50,))


@pytest.mark.parametrize(
    ("stages", "microbatches", "sampling", "cycle", "bubble", "enough"),
    [
        # One stage, one batch: everything in a row, wherever sampling is.
        (1, 1, LAST, 150, 0, 1),
        (1, 1, CPUS, 150, 1 / 3, 2),
        # A second batch fills the time that the CPUs need.
        (1, 2, CPUS, 100, 0, 2),
        # Two stages: the last one takes 150, the first waits a third of the time.
        (2, 2, LAST, 150, 1 / 6, 2),
        # On CPUs with as many microbatches as stages: a loop of 250 for two.
        (2, 2, CPUS, 125, 1 / 5, 3),
        # CPUs slower than a stage set the pace.
        (2, 9, Sampling("slow CPUs", beside_us=(140,)), 140, 2 / 7, 3),
        # The bus and the CPUs overlap for different microbatches.
        (2, 4, Sampling("bus, CPUs", beside_us=(90, 100)), 100, 0, 4),
        # A fused kernel that is faster than the matmul it replaces.
        (2, 2, Sampling("fused", on_stage_us=-20), 100, 1 / 10, 2),
        # Section 3: sampling of 40 % of a stage leaves 2 / 7 of the others idle.
        (4, 4, Sampling("last", on_stage_us=40), 140, 3 / 14, 4),
    ],
)
def test_pipelines_worked_out_by_hand(stages, microbatches, sampling, cycle, bubble, enough):
    outcome = steady_state(stages, 100, microbatches, 32, sampling)
    assert outcome.cycle_us == pytest.approx(cycle)
    assert outcome.bubble == pytest.approx(bubble, abs=1e-9)
    assert outcome.tokens_per_s == pytest.approx(32e6 / cycle)
    assert outcome.step_us == pytest.approx(cycle * microbatches)
    assert outcome.enough_in_flight == enough


def test_sampling_cannot_save_more_than_its_stage_takes():
    with pytest.raises(InvalidArgument, match="on_stage_us: expected at least -100"):
        steady_state(2, 100, 2, 1, Sampling("", on_stage_us=-101))
