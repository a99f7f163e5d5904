"""The model of text, the order of tokens, and the share that the hot ones cover."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsbench.errors import InvalidArgument
from fsbench.simple import hot
from fsbench.simple.zipf import ZipfText

V = 2000
TEXT = ZipfText(V, knee=200)


def test_laws_and_rows_are_distributions():
    for document in (0, 1, 65):
        law = TEXT.law(document)
        assert law.shape == (V,) and (law > 0).all()
        assert law.sum() == pytest.approx(1)
    logits = TEXT.logits(5, first=3)
    assert logits.shape == (5, V)
    assert torch.allclose(logits.double().exp().sum(1), torch.ones(5).double(), atol=1e-5)


def test_the_common_law_is_zipfs():
    p = np.sort(ZipfText(V, knee=200, topic_share=0.0).law(0))[::-1]
    assert p[0] / p[99] == pytest.approx(100)
    assert p[199] / p[399] == pytest.approx(4)  # exponent 2 beyond the knee


def test_a_seed_gives_the_same_text_another_one_another():
    assert np.array_equal(TEXT.trace(range(3), 50), ZipfText(V, knee=200).trace(range(3), 50))
    assert not np.array_equal(
        TEXT.trace(range(3), 50), ZipfText(V, 1, knee=200).trace(range(3), 50)
    )
    assert torch.equal(TEXT.logits(2), ZipfText(V, knee=200).logits(2))


def test_tokens_of_a_document_follow_its_law():
    counts = np.bincount(TEXT.trace(range(7, 8), 200_000)[0], minlength=V)
    p = TEXT.law(7)
    top = p.argsort()[-20:]
    z = (counts[top] - 200_000 * p[top]) / np.sqrt(200_000 * p[top])
    assert np.abs(z).max() < 5


def test_steps_have_the_hot_mass_of_their_law_on_average():
    one_topic = ZipfText(V, knee=200, topics=1)
    few = one_topic.law(0).argsort()[-100:]
    rows = one_topic.logits(2000).double().exp()[:, torch.from_numpy(few.copy())].sum(1)
    error = float(rows.std()) / 2000**0.5
    assert abs(float(rows.mean()) - one_topic.law(0)[few].sum()) < 5 * error


def test_order_is_by_count_then_by_token():
    assert hot.order_of(np.array([[3, 3, 1, 4, 1, 3]]), 6).tolist() == [3, 1, 4, 0, 2, 5]


def test_coverage_of_a_trace_worked_out_by_hand():
    order = np.array([3, 1, 4, 0, 2, *range(5, 40)])
    trace = np.array([[3, 3, 1, 0], [39, 39, 39, 3]])
    cover = hot.coverage(order, trace, grid=2)
    assert cover.sizes.tolist() == [16, 40]
    assert cover.mean.tolist() == [(1 + 1 / 4) / 2, 1]
    assert cover.low.tolist() == [pytest.approx(0.25 + 0.075), 1]


def test_coverage_is_monotone_and_has_its_slope():
    counted, rest = hot.halves(TEXT.trace(range(64), 256))
    cover = hot.coverage(hot.order_of(counted, V), rest)
    H = np.arange(0, V + 1)
    a = cover.at(H)
    assert a[0] == 0 and a[-1] == pytest.approx(1) and (np.diff(a) >= -1e-12).all()
    at = np.array([20.5, 333.3, 1500.5])
    numeric = (cover.at(at + 1e-4) - cover.at(at - 1e-4)) / 2e-4
    assert cover.slope(at) == pytest.approx(numeric, rel=1e-4)


def test_halves_are_disjoint():
    left, right = hot.halves(np.arange(12).reshape(4, 3))
    assert left.tolist() == [[0, 1, 2], [6, 7, 8]] and right.tolist() == [[3, 4, 5], [9, 10, 11]]
    left, right = hot.halves(np.arange(6).reshape(1, 6))
    assert left.tolist() == [[0, 1, 2]] and right.tolist() == [[3, 4, 5]]


def test_traces_are_read(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1, 2], [3, 4]]))
    (tmp_path / "b.txt").write_text("1 2 9\n\n3 4\n")
    for name in ("a.npy", "b.txt"):
        assert hot.read_trace(tmp_path / name, 10).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "No such file"),
        ("empty.txt", "", "expected token ids, a document per row"),
        ("high.txt", "1 10\n", r"expected ids in \[0, 10\)"),
        ("words.txt", "one two\n", "could not be read|string or file|could not convert"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgument, match=message):
        hot.read_trace(tmp_path / name, 10)
