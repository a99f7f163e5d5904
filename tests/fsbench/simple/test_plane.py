"""Samplers over a ring: the same tokens for any number of them, penalties, failures."""

from __future__ import annotations

import pytest
import torch

from fsbench.errors import InvalidArgument
from fsbench.reference import philox4x32
from fsbench.reference.truncation import penalized, token_counts
from fsbench.simple import native, reference
from fsbench.simple.plane import Plane, PlaneStalled, uniforms
from fsbench.simple.ring import RingShape

pytestmark = pytest.mark.skipif(bool(native.missing()), reason=str(native.missing()))

B, V = 24, 3001


def logits(steps: int = 1) -> torch.Tensor:
    return 3 * torch.randn(steps, B, V, generator=torch.Generator().manual_seed(0))


def drawn(plane: Plane, rows: torch.Tensor, offset: int = 0, **parameters) -> torch.Tensor:
    """Tokens of one step of logits [B, V]."""
    slot, n = plane.slot, len(rows)
    plane.ring.logits[slot, :n].copy_(rows)
    for name, value in parameters.items():
        plane.ring.parts[name][slot, :n].copy_(torch.as_tensor(value))
    uniforms(plane.ring.uniform[slot, :n], torch.tensor([7]), torch.tensor([offset]))
    return plane.wait(plane.publish(n), n).clone()


def test_uniforms_are_philox_by_row_and_step():
    out = torch.empty(5, dtype=torch.float64)
    seed = -123456789012345
    uniforms(out, torch.tensor([seed]), torch.tensor([9]))
    rows, key = torch.arange(5), seed % 2**64
    zero, counter = torch.zeros(5, dtype=torch.int64), torch.tensor
    words = philox4x32(
        (zero, rows, counter(9), counter(1 << 17)), (counter(key % 2**32), counter(key >> 32))
    )
    bits = [
        (high * 2**32 + low) >> 12
        for high, low in zip(words[0].tolist(), words[1].tolist(), strict=True)
    ]
    assert out.tolist() == [(each + 0.5) / 2**52 for each in bits]
    by_request = torch.empty(2, dtype=torch.float64)
    uniforms(by_request, torch.tensor([seed, seed]), torch.tensor([9]))
    assert by_request.tolist() == [out[0], out[0]]


@pytest.mark.parametrize("samplers", [2, 5])
def test_tokens_do_not_depend_on_the_number_of_samplers(samplers):
    plane, one = Plane(RingShape(2, B, V), samplers), Plane(RingShape(1, B, V), 1)
    uniform = torch.empty(B, dtype=torch.float64)
    for number, rows in enumerate(logits(8)):
        tokens = drawn(plane, rows, number)
        uniforms(uniform, torch.tensor([7]), torch.tensor([number]))
        assert reference.decide(rows, uniform).accepts(tokens, uniform).all()
        assert torch.equal(tokens, drawn(one, rows, number))


def test_steps_in_flight_are_decided_in_their_slots():
    """Slots are used again while a late sampler may still look at an old step."""
    steps = logits(3)
    alone = Plane(RingShape(1, B, V), 1)
    expected = [drawn(alone, rows) for rows in steps]
    plane = Plane(RingShape(3, B, V), 4)
    for rows in plane.ring.uniform:
        uniforms(rows, torch.tensor([7]), torch.tensor([0]))
    for number in range(100):
        sizes = [1 + (number + i) % B for i in range(3)]
        published = []
        for i in range(3):
            plane.ring.logits[plane.slot].copy_(steps[i])
            published.append(plane.publish(sizes[i]))
        for i in (2, 0, 1):
            assert torch.equal(plane.wait(published[i], sizes[i]), expected[i][: sizes[i]])


@pytest.mark.parametrize(
    ("temperature", "repetition"), [(0.015, 0.5), (1e-4, 0.5), (2.0**-100, 0.01), (1.0, 0.01)]
)
def test_a_tail_token_that_is_raised_far_above_the_tail_keeps_its_mass(temperature, repetition):
    """By 15 / T and more: the exponential of that is infinite in double precision, too."""
    n, V, hot = 256, 1001, 7
    raised = V - 1
    rows = torch.zeros(n, V)
    rows[:, hot:] = 15.0  # the tail's maximum, which many tokens have
    rows[:, 3] = 15.0 / repetition  # hot; the raised one comes up to it
    plane = Plane(RingShape(1, n, V), 2, requests=n)
    for row in range(n):
        plane.begin(row, [raised], repetition=repetition)
    plane.ring.parts["shape"][0] = torch.tensor(plane.shape.hot(hot))
    plane.ring.tail_max[0], plane.ring.tail_sum[0] = reference.tail(rows, hot, temperature)
    uniform = torch.empty(n, dtype=torch.float64)
    counts = (token_counts([seen] * n, V) for seen in ([raised], []))
    z = penalized(rows, *counts, repetition=repetition)
    for step in range(2):
        request = torch.arange(n, dtype=torch.int32)
        tokens = drawn(plane, rows, step, temperature=temperature, request=request)
        uniforms(uniform, torch.tensor([7]), torch.tensor([step]))
        expected = reference.decide(z, uniform, temperature=temperature)
        assert expected.accepts(tokens, uniform).all(), tokens.unique(return_counts=True)
        assert 0.35 < (tokens == raised).float().mean() < 0.65
        assert 0.35 < (tokens == 3).float().mean() < 0.65
        for row in range(n):
            plane.begin(row, [raised], repetition=repetition)  # what was drawn is forgotten


def test_a_new_request_forgets_the_old_one():
    plane = Plane(RingShape(1, 1, V), 1, requests=1)
    rows = logits()[0, :1]
    best = int(rows.argmax())
    greedy = {"temperature": 0.0, "request": 0}
    plane.begin(0, [best], repetition=100.0)
    assert drawn(plane, rows, **greedy).item() != best
    plane.begin(0)
    assert drawn(plane, rows, **greedy).item() == best


def test_waiting_for_a_closed_plane_is_an_error():
    plane = Plane(RingShape(1, 1, 64), 1)
    plane.close()
    with pytest.raises(PlaneStalled, match=r"step 0: not decided within 0\.05 s"):
        plane.wait(plane.publish(1), 1, timeout_s=0.05)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("request", 1),  # there is one row of penalties
        ("shape", [65, 64, 64]),  # more hot tokens than tokens
        ("shape", [-1, 64, 64]),
        ("shape", [8, 4, 4]),  # more hot tokens than are there
        ("shape", [0, 128, 128]),
        ("shape", [0, 64, 32]),  # rows that overlap
    ],
)
def test_a_slot_that_makes_no_sense_gives_no_tokens(part, value):
    plane = Plane(RingShape(1, 2, 64), 1, requests=1)
    plane.ring.logits.zero_()
    plane.ring.parts[part][0] = torch.tensor(value)
    assert plane.wait(plane.publish(2), 2).tolist() == [-1, -1]


def test_wrong_arguments_are_refused():
    plane = Plane(RingShape(1, 2, 64), 1, requests=1)
    for call, message in [
        (lambda: RingShape(1, 2**16, 64), "rows: expected fewer than 65536"),
        (lambda: plane.publish(3), "rows: expected 1 to 2; got 3"),
        (lambda: plane.begin(1), "request: expected 0 to 0; got 1"),
        (lambda: plane.begin(0, [64]), r"tokens: expected ids in \[0, 64\)"),
        (lambda: plane.begin(0, repetition=0.0), "repetition: expected a number above 0"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            call()
