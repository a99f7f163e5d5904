"""The launch cache: what its keys have, what is passed on, and that nothing is kept alive."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from unittest import mock

import pytest
import torch
import triton
from flash_sample_cases import TILES, counter, normal_logits, packed, problem
from torch import Tensor

from fsbench import reference
from fsbench.errors import InvalidArgument
from fsbench.kernels import (
    Sample,
    flash_sample,
    prepare_head,
    quantize_head,
    score,
    screened_sample,
    truncated_sample,
)
from fsbench.kernels.fused.launch import FusedLaunch
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.launch.launch_cache import Launch, launch_kernel, launch_key
from fsbench.kernels.launch.request import SMALLEST, checked_request
from fsbench.kernels.noise.contract import SMALLEST_TEMPERATURE

pytestmark = pytest.mark.usefixtures("one_thread", "empty_cache")
B, V, D = 3, 140, 32
interpreted = pytest.mark.interpreter


@pytest.fixture
def empty_cache(monkeypatch) -> dict:
    found: dict = {}
    monkeypatch.setattr(launch_cache, "LAUNCHES", found)
    return found


def test_greedy_temperatures_are_those_of_the_kernels_and_of_the_reference():
    assert SMALLEST == SMALLEST_TEMPERATURE.value == reference.logits.SMALLEST_TEMPERATURE


class Kernel:
    """Stands in for a compiled kernel; notes each way in which it is launched."""

    arg_names = ("first", "fixed", "second", "third")
    packed_metadata = ()

    def __init__(self) -> None:
        self.bound: list[dict[str, object]] = []
        self.direct: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        assert grid in ((7,), (7, 1, 1))
        return self._bind if grid == (7,) else lambda *values: self.direct.append(values)

    def _bind(self, **arguments: object) -> Kernel:
        assert arguments.pop("enable_fp_fusion") is True
        self.bound.append(arguments)
        return self


@pytest.fixture
def launch() -> Launch:
    return Launch(Kernel(), (7,), {"fixed": "F"})


WORDS = torch.zeros(32, dtype=torch.int64)


def test_the_second_launch_passes_the_binder_with_its_own_arguments(launch):
    for first, number in ((WORDS, 0.5), (WORDS[2:], 0.7)):
        launch({"second": number, "first": first, "of_another_kernel": None})
    [bound] = launch.kernel.bound
    assert bound == {"first": WORDS, "fixed": "F", "second": 0.5, "third": None}
    assert launch.kernel.direct == [(WORDS[2:].data_ptr(), "F", 0.7, None)]


def test_an_argument_that_the_kernel_does_not_have_is_not_dropped(launch):
    with pytest.raises(InvalidArgument, match="expected one with an argument an_option_of_later"):
        launch({"an_option_of_later": 1})


def test_no_tensor_is_kept_alive_by_a_launch(launch):
    words = torch.zeros(32, dtype=torch.int64)
    launch.kernel._bind = lambda **arguments: launch.kernel
    alive = weakref.ref(words)
    launch({"first": words, "second": 0.5, "third": None})
    del words
    assert alive() is None


def test_launch_kernel_passes_the_binder_with_what_is_alike_alone():
    kernel, device = Kernel(), torch.device("cpu")

    def launch(**changes):
        arguments = {"first": WORDS, "fixed": "F", "second": 0.5, "third": 3} | changes
        launch_kernel(kernel, arguments.pop("device", device), (7,), **arguments)

    launch()
    launch(second=0.7)
    assert len(kernel.bound) == 1 and kernel.direct == [(WORDS.data_ptr(), "F", 0.7, 3)]
    changes = [{"fixed": "G"}, {"third": 4}, {"third": 1.0}, {"first": 1.0}, {"first": WORDS[1:]}]
    changes += [{"first": None}, {"first": WORDS.half()}, {"device": torch.device("cuda", 1)}]
    for change in changes:
        launch(**change)
    assert len(kernel.bound) == 1 + len(changes) and len(kernel.direct) == 1


def test_a_first_launch_that_fails_is_tried_again():
    kernel = Kernel()
    kernel._bind = mock.Mock(side_effect=[RuntimeError("out of memory"), kernel])
    for _ in range(2):
        with suppress(RuntimeError):
            launch_kernel(kernel, torch.device("cpu"), (7,), **dict.fromkeys(Kernel.arg_names))
    assert kernel._bind.call_count == 2


def request(**changes: object):
    given = {"hidden": torch.zeros(B, D), "weight": torch.zeros(V, D)}
    given |= {"seed": counter(0), "temperature": 1.0}
    given |= dict.fromkeys(("offset", "soft_cap", "bias", "mask", "vocab_size")) | changes
    return checked_request(given.pop("hidden"), given.pop("weight"), **given)


def shifted(x: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


KEYS = [
    {},
    {"hidden": torch.zeros(B + 1, D)},
    {"hidden": torch.zeros(B, D).half(), "weight": torch.zeros(V, D).half()},
    {"hidden": torch.zeros(B, D + 1), "weight": torch.zeros(V, D + 1)},
    {"hidden": shifted(torch.zeros(B, D))},
    {"weight": torch.zeros(V + 1, D)},
    {"weight": shifted(torch.zeros(V, D))},
    {"seed": counter(*range(B))},
    {"seed": shifted(counter(0))},
    {"offset": counter(0)},
    {"offset": counter(*range(B))},
    {"temperature": 0.0},
    {"temperature": torch.ones(B)},
    {"soft_cap": 3.0},
    {"bias": torch.zeros(V)},
    {"bias": torch.zeros(V).half()},
    {"bias": torch.zeros(B, V)},
    {"bias": shifted(torch.zeros(V))},
    {"mask": torch.ones(B, V, dtype=torch.bool)},
    {"mask": torch.ones(B, 5, dtype=torch.int32)},
    {"mask": torch.ones(B, 6, dtype=torch.int32)},
    {"vocab_size": V - 1},
    {"num_samples": 2},
    {"noise": "token"},
    *(
        {"weight": quantize_head(torch.zeros(V, D), dtype, per_row=each), "may_be_quantized": True}
        for dtype, each in ((torch.int8, True), (torch.float8_e4m3fn, True), (torch.int8, False))
    ),
]


def test_keys_differ_by_all_that_decides_a_launch():
    out = (torch.zeros(B), None)
    keys = [launch_key(request(**changes), out) for changes in KEYS]
    keys.append(launch_key(request()._replace(merge_later=True), out))
    keys += [launch_key(request(), others) for others in ((None, out[0]), (shifted(out[0]), None))]
    keys += [launch_key(request(), out, choice) for choice in ("hopper", TILES, 4)]
    assert len(set(keys)) == len(keys)


def test_a_key_has_no_sizes_of_floats_and_no_addresses():
    for values in [{"temperature": 0.3}, {"temperature": 2}], [{"soft_cap": 1.0}, {"soft_cap": 30}]:
        first, second = (launch_key(request(**changes), ()) for changes in values)
        assert first == second
    assert launch_key(request(), ()) == launch_key(request(), ())


def calls() -> Iterator[tuple[Callable[..., tuple], dict]]:
    """Public calls with all kinds of arguments, and arguments that they may have."""
    hidden, weight = problem(B, V, D, torch.float16)
    matrices = {"hidden": hidden, "weight": weight, "seed": counter(3), "offset": counter(1)}
    everything = {
        **matrices,
        "bias": normal_logits(1, V)[0].half(),
        "mask": packed(normal_logits(B, V) > -2),
        "temperature": torch.tensor([1.0, 0.0, 0.5]),
        "num_samples": 5,
        "soft_cap": 30.0,
        **dict.fromkeys(("return_logprob", "return_entropy", "return_rank"), True),
    }
    yield flash_sample, matrices
    yield flash_sample, everything
    yield flash_sample, matrices | {"weight": quantize_head(weight)}
    yield truncated_sample, matrices | {"top_k": 5}
    yield screened_sample, {"head": prepare_head(weight), **matrices, "weight": None}
    scored = {name: everything[name] for name in ("hidden", "weight", "bias", "mask")}
    yield score, scored | {"targets": torch.arange(B), "return_rank": True}


def variants(given: dict) -> Iterator[dict]:
    """The arguments at other addresses: every second tensor at one that is no multiple of 16."""
    tensors = [name for name, x in given.items() if isinstance(x, Tensor)]
    yield given | {name: given[name].clone() for name in tensors}
    for first in (0, 1):
        yield given | {name: shifted(given[name]) for name in tensors[first::2]}


def compiled_for(moving: dict[str, object]) -> dict[str, object]:
    """What Triton compiles for of arguments that move."""
    return {
        name: (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else type(x)
        for name, x in moving.items()
    }


@pytest.fixture
def seen(monkeypatch) -> dict[int, list[dict[str, object]]]:
    """What each Launch was given, as Triton compiles for it."""
    found: dict[int, list[dict[str, object]]] = {}
    launched = Launch.__call__

    def watched(launch: Launch, moving: dict[str, object]) -> None:
        found.setdefault(id(launch), []).append(compiled_for(moving))
        launched(launch, moving)

    monkeypatch.setattr(Launch, "__call__", watched)
    return found


def one_kind_each(seen: dict[int, list[dict[str, object]]]) -> bool:
    return all(kind == kinds[0] for kinds in seen.values() for kind in kinds)


@interpreted
def test_calls_of_one_key_are_alike_in_all_that_triton_compiles_for(seen, empty_cache):
    for call, given in calls():
        given = {name: x for name, x in given.items() if x is not None}
        expected = call(**given)
        for other in variants(given):
            for field, wanted in zip(call(**other), expected, strict=True):
                assert field is wanted is None or torch.equal(field, wanted)
    assert one_kind_each(seen)
    assert len(seen) > 15 and any(len(kinds) > 1 for kinds in seen.values())
    assert len(empty_cache) > 0


@interpreted
def test_a_key_without_alignment_would_be_seen(seen, monkeypatch):
    monkeypatch.setattr("fsbench.kernels.fused.api.launch_key", lambda *arguments: "one")
    given = next(calls())[1]
    for seed in (given["seed"], shifted(given["seed"])):
        flash_sample(**given | {"seed": seed})
    assert not one_kind_each(seen)


@interpreted
def test_every_option_reaches_the_kernel_from_the_second_call_on():
    """Called plainly first, so that an option which no key has would be lost."""
    hidden, weight = problem(B, V, D, torch.float16)
    given = {"hidden": hidden, "weight": weight, "seed": counter(3)}
    for _ in range(2):
        plain = flash_sample(**given)
    one, largest = torch.full((V,), -torch.inf), plain.tokens.clone()
    one[7] = 0.0
    options = {
        "bias": (one, lambda drawn: drawn.tokens.tolist() == [7] * B),
        "mask": (one.isfinite().expand(B, V).contiguous(), lambda x: x.tokens.tolist() == [7] * B),
        "num_samples": (3, lambda drawn: drawn.tokens.shape == (B, 3)),
        "soft_cap": (1e-6, lambda drawn: drawn.tokens.tolist() != largest.tolist()),
        "vocab_size": (1, lambda drawn: drawn.tokens.tolist() == [0] * B),
        "return_logprob": (True, lambda drawn: (drawn.logprob < 0).all()),
        "return_logz": (True, lambda drawn: (drawn.logz > 0).all()),
        "return_entropy": (True, lambda drawn: (drawn.entropy > 0).all()),
        "return_rank": (True, lambda drawn: (drawn.rank >= 0).all()),
        "return_top": (2, lambda drawn: drawn.top_tokens.shape == (B, 2)),
        "noise": ("token", lambda drawn: drawn.tokens.tolist() != largest.tolist()),
        "out": (Sample(torch.zeros(B).long(), torch.zeros(B).bool()), lambda x: x.valid.all()),
        "config": (TILES, lambda drawn: drawn.tokens.tolist() == largest.tolist()),
        "kernel": ("portable", lambda drawn: drawn.tokens.tolist() == largest.tolist()),
        "temperature": (torch.zeros(B), lambda x: x.tokens.tolist() == greedy.tolist()),
        "offset": (counter(8), lambda drawn: drawn.tokens.tolist() != largest.tolist()),
        "shard": (None, lambda drawn: drawn.tokens.tolist() == largest.tolist()),
    }
    greedy = (hidden.float() @ weight.float().T).argmax(1)
    assert {*options, *given} == set(inspect.signature(flash_sample).parameters)
    for name, (value, holds) in options.items():
        assert holds(flash_sample(**given, **{name: value})), name
    assert flash_sample(**given).tokens.tolist() == largest.tolist()


@interpreted
def test_a_cached_call_launches_nothing_where_no_kernel_runs(monkeypatch):
    hidden, weight = problem(B, V, D)
    call = partial(flash_sample, hidden, weight, seed=counter(3))
    expected = call().tokens
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(FusedLaunch, "__call__", None)
    assert call().tokens.tolist() == expected.tolist()


@interpreted
def test_no_tensor_is_kept_alive(empty_cache):
    given = {name: x for name, x in list(calls())[1][1].items()}
    for _ in range(2):
        flash_sample(**given)
    assert empty_cache
    alive = [weakref.ref(x) for x in given.values() if isinstance(x, Tensor)]
    given.clear()
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


@interpreted
def test_the_cache_does_not_grow_without_end(monkeypatch, empty_cache):
    monkeypatch.setattr(launch_cache, "MAX_KEYS", 2)
    hidden, weight = problem(B, V, D)
    for T in (1.0, 0.3, 0.0, torch.ones(B)):
        flash_sample(hidden, weight, seed=counter(0), temperature=T)
    assert len(empty_cache) == 1
