"""Samplers over a ring: the same tokens whoever draws them, penalties kept, failures told."""

from __future__ import annotations

import multiprocessing
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch

from fsbench.errors import InvalidArgument
from fsbench.reference import philox4x32
from fsbench.simple import native, reference
from fsbench.simple.plane import Plane, PlaneStalled, uniforms
from fsbench.simple.ring import Ring, RingShape

pytestmark = pytest.mark.skipif(bool(native.missing()), reason=str(native.missing()))

B, V = 24, 3001


def logits(steps: int = 1) -> torch.Tensor:
    return 3 * torch.randn(steps, B, V, generator=torch.Generator().manual_seed(0))


def drawn(plane: Plane, rows: torch.Tensor, offset: int = 0, **parameters) -> torch.Tensor:
    """Tokens of one step of logits [B, V]."""
    slot, n = plane.slot, len(rows)
    plane.ring.logits[slot, 0, :n].copy_(rows)
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
    own = torch.empty(2, dtype=torch.float64)
    uniforms(own, torch.tensor([seed, seed]), torch.tensor([9]))
    assert own.tolist() == [out[0], out[0]]


@pytest.mark.parametrize("samplers", [1, 2, 5])
def test_tokens_do_not_depend_on_the_number_of_samplers(samplers):
    steps = logits(8)
    plane = Plane(RingShape(2, B, V), samplers)
    uniform = torch.empty(B, dtype=torch.float64)
    for number, rows in enumerate(steps):
        tokens = drawn(plane, rows, number)
        uniforms(uniform, torch.tensor([7]), torch.tensor([number]))
        assert reference.decide(rows, uniform).accepts(tokens, uniform).all()
        one = Plane(RingShape(1, B, V), 1)
        assert torch.equal(tokens, drawn(one, rows, number))


def test_steps_in_flight_are_decided_in_their_slots():
    """Slots are used again and again while a late sampler may still look at an old step."""
    steps = logits(3)
    alone = Plane(RingShape(1, B, V), 1)
    wanted = [drawn(alone, rows) for rows in steps]
    plane = Plane(RingShape(3, B, V, spin_us=0), 4)
    for rows in plane.ring.uniform:
        uniforms(rows, torch.tensor([7]), torch.tensor([0]))
    for number in range(200):
        sizes = [1 + (number + i) % B for i in range(3)]
        published = []
        for i in range(3):
            plane.ring.logits[plane.slot, 0].copy_(steps[i])
            published.append(plane.publish(sizes[i]))
        for i in (2, 0, 1):
            assert torch.equal(plane.wait(published[i], sizes[i]), wanted[i][: sizes[i]])


@pytest.mark.parametrize(
    "given",
    [
        {"repetition": 1.3},
        {"repetition": 0.8},
        {"presence": 0.7},
        {"frequency": 0.4},
        {"repetition": 1.2, "presence": -0.5, "frequency": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("hot", "dtype"), [(0, "fp32"), (300, "bf16")])
def test_penalties_kept_in_steps_are_the_dense_ones(given, hot, dtype):
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(V, generator=generator)
    plane = Plane(RingShape(2, B, V, dtype=dtype), 2, requests=B, order=order)
    prompts = [torch.randint(0, V, (50 * row,), generator=generator).tolist() for row in range(B)]
    outputs = [torch.randint(0, V, (7 * row,), generator=generator).tolist() for row in range(B)]
    for row in range(B):
        plane.begin(row, prompts[row], **given)
        plane.drawn(row, outputs[row])
    parameters = {"temperature": 0.8, "request": torch.arange(B, dtype=torch.int32)}
    uniform = torch.empty(B, dtype=torch.float64)
    rows = logits()[0].to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    rows[:, 5] = 9.0  # drawn often, so its count grows
    for number in range(6):
        filters = [{}, {"top_k": 20}, {"top_p": 0.7}][number % 3]
        slot = plane.slot
        plane.ring.parts["shape"][slot] = torch.tensor(plane.shape.hot(hot))
        for name, off in {"top_k": 0, "top_p": 1.0}.items():
            plane.ring.parts[name][slot] = filters.get(name, off)
        if hot:
            largest, total = reference.tail(rows[:, order], hot, 0.8)
            plane.ring.tail_max[slot], plane.ring.tail_sum[slot] = largest, total
        tokens = drawn(plane, rows[:, order], number, **parameters)
        uniforms(uniform, torch.tensor([7]), torch.tensor([number]))
        z = reference.penalized(rows, prompts, outputs, **given)
        expected = reference.decide(z, uniform, temperature=0.8, order=order, **filters)
        assert expected.accepts(tokens, uniform).all(), (number, tokens, expected.tokens)
        for row, token in enumerate(tokens.tolist()):
            outputs[row].append(token)


@pytest.mark.parametrize(
    ("temperature", "repetition"), [(0.015, 0.5), (1e-4, 0.5), (2.0**-100, 0.01), (1.0, 0.01)]
)
def test_a_tail_token_that_is_raised_far_above_the_tail_keeps_its_mass(temperature, repetition):
    """By 15 / T and more: the exponential of that is infinite in double precision, too."""
    n, hot, raised = 256, 7, V - 1
    rows = torch.zeros(n, V)
    rows[:, hot:] = 15.0  # the tail's maximum, which many tokens have
    rows[:, 3] = 15.0 / repetition  # hot; the raised one comes up to it
    plane = Plane(RingShape(1, n, V), 2, requests=n)
    for row in range(n):
        plane.begin(row, [raised], repetition=repetition)
    plane.ring.parts["shape"][0] = torch.tensor(plane.shape.hot(hot))
    plane.ring.tail_max[0], plane.ring.tail_sum[0] = reference.tail(rows, hot, temperature)
    uniform = torch.empty(n, dtype=torch.float64)
    z = reference.penalized(rows, [[raised]] * n, [[]] * n, repetition=repetition)
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


def _produce(name: str, shape: RingShape, rows: torch.Tensor) -> None:
    """Another process, which knows the buffer's name only."""
    memory = SharedMemory(name)
    ring = Ring(shape, memory.buf, fresh=False)
    ring.logits[0, 0].copy_(rows)
    ring.temperature.fill_(0.0)
    native.core().fsb_publish(ring.pointer(), len(rows))


def test_the_producer_may_be_another_process():
    shape = RingShape(1, B, V)
    memory = SharedMemory(create=True, size=shape.bytes())
    try:
        plane = Plane(shape, 2, buffer=memory.buf)
        rows = logits()[0]
        context = multiprocessing.get_context("spawn")
        producer = context.Process(target=_produce, args=(memory.name, shape, rows))
        producer.start()
        producer.join()
        assert producer.exitcode == 0
        assert torch.equal(plane.wait(0, B), rows.argmax(1))
        plane.close()
    finally:
        memory.unlink()


def test_a_plane_that_is_closed_tells_who_waits():
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
        (lambda: RingShape(1, 2, 65, shards=2), "shards: expected a divisor of vocab 65; got 2"),
        (lambda: RingShape(0, 2, 64), "slots: expected >= 1; got 0"),
        (lambda: RingShape(1, 2**16, 64), "rows: expected fewer than 65536"),
        (lambda: RingShape(1, 2, 64, dtype="fp16"), "dtype: expected fp32 or bf16; got 'fp16'"),
        (lambda: Plane(RingShape(1, 1, 4), 0), "samplers: expected >= 1; got 0"),
        (
            lambda: Plane(RingShape(1, 1, 4), order=torch.zeros(4).long()),
            "order: expected a permut",
        ),
        (lambda: plane.publish(3), "rows: expected 1 to 2; got 3"),
        (lambda: plane.begin(1), "request: expected 0 to 0; got 1"),
        (lambda: plane.begin(0, [64]), r"tokens: expected ids in \[0, 64\)"),
        (lambda: plane.begin(0, repetition=0.0), "repetition: expected a number above 0"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            call()
