"""The launch cache: its keys, the arguments of later launches, and what it keeps alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from unittest import mock

import pytest
import torch
from flash_sample_cases import TILES, counter, normal_logits, packed, problem
from torch import Tensor

from fsbench import reference
from fsbench.errors import InvalidArgument
from fsbench.kernels import (
    flash_sample,
    prepare_head,
    quantize_head,
    score,
    screened_sample,
    truncated_sample,
)
from fsbench.kernels.fused.launch import FusedLaunch
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.launch.launch_cache import Launch, LaunchSequence, launch_kernel, launch_key
from fsbench.kernels.launch.request import SMALLEST, checked_request
from fsbench.kernels.noise.contract import SMALLEST_TEMPERATURE

pytestmark = pytest.mark.usefixtures("one_thread", "empty_cache")
B, V, D = 3, 140, 32
interpreted = pytest.mark.interpreter


@pytest.fixture
def empty_cache(monkeypatch) -> dict:
    cache: dict = {}
    monkeypatch.setattr(launch_cache, "LAUNCHES", cache)
    return cache


def test_greedy_temperatures_are_those_of_the_kernels_and_of_the_reference():
    assert SMALLEST == SMALLEST_TEMPERATURE.value == reference.logits.SMALLEST_TEMPERATURE


class Kernel:
    """A double of a compiled kernel that records its launches."""

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


def test_the_second_launch_skips_the_binder_and_has_its_arguments(launch):
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


@pytest.fixture
def sequence() -> LaunchSequence:
    launches = [Launch(Kernel(), (7,), {"fixed": "F"})]
    launches.append(Launch(Kernel(), (7,), {"fixed": "G", "second": None}))
    return LaunchSequence(launches, {"third": ((2, 3), torch.int32)}, torch.device("cpu"))


def test_kernels_of_a_sequence_get_their_own_arguments_and_the_same_new_memory(sequence):
    sequence({"second": 0.5, "first": WORDS, "of_another_kernel": None})
    with mock.patch.object(Launch, "__call__", None):  # it would take the addresses once more
        sequence({"second": 0.7, "first": WORDS[2:], "of_another_kernel": None})
    one, two = (launch.kernel for launch in sequence.launches)
    [first_bound], [second_bound] = one.bound, two.bound
    memory = first_bound.pop("third")
    assert memory.shape == (2, 3) and memory.dtype == torch.int32
    assert second_bound.pop("third") is memory
    assert first_bound == {"first": WORDS, "fixed": "F", "second": 0.5}
    assert second_bound == {"first": WORDS, "fixed": "G", "second": None}
    [(*first_direct, address)], [second_direct] = one.direct, two.direct
    assert first_direct == [WORDS[2:].data_ptr(), "F", 0.7] and address != memory.data_ptr()
    assert second_direct == (WORDS[2:].data_ptr(), "G", None, address)


def test_a_sequence_refuses_an_argument_that_no_kernel_has(sequence):
    with pytest.raises(InvalidArgument, match="expected one with an argument an_option_of_later"):
        sequence({"first": WORDS, "an_option_of_later": 1})
    assert not any(launch.kernel.bound for launch in sequence.launches)


def test_a_sequence_whose_first_call_failed_launches_all_kernels(sequence):
    one, two = (launch.kernel for launch in sequence.launches)
    two._bind = mock.Mock(side_effect=[RuntimeError("out of memory"), two])
    for _ in range(3):
        with suppress(RuntimeError):
            sequence({"first": WORDS, "second": 0.5})
    assert len(one.bound) == 1 and two._bind.call_count == 2
    assert len(one.direct) == 2 and len(two.direct) == 1


def test_launch_kernel_skips_the_binder_for_equal_keys_alone():
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
    arguments = {"hidden": torch.zeros(B, D), "weight": torch.zeros(V, D)}
    arguments |= {"seed": counter(0), "temperature": 1.0}
    arguments |= dict.fromkeys(("offset", "soft_cap", "bias", "mask", "vocab_size")) | changes
    return checked_request(arguments.pop("hidden"), arguments.pop("weight"), **arguments)


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
    """Yield public calls with their arguments."""
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
    yield truncated_sample, matrices | {"top_p": 0.5}
    by_row = {"top_k": torch.tensor([0, 5, 60]), "top_p": torch.tensor([0.5, 0.9, 1.0])}
    yield truncated_sample, matrices | by_row | {"temperature": everything["temperature"]}
    yield truncated_sample, matrices | {"weight": prepare_head(weight), "top_k": 5}
    yield screened_sample, {"head": prepare_head(weight), **matrices, "weight": None}
    scored = {name: everything[name] for name in ("hidden", "weight", "bias", "mask")}
    yield score, scored | {"targets": torch.arange(B), "return_rank": True}


def variants(arguments: dict) -> Iterator[dict]:
    """Yield the arguments at other addresses; half of the tensors at no multiple of 16."""
    tensors = [name for name, x in arguments.items() if isinstance(x, Tensor)]
    yield arguments | {name: arguments[name].clone() for name in tensors}
    for first in (0, 1):
        yield arguments | {name: shifted(arguments[name]) for name in tensors[first::2]}


def compiled_for(moving: dict[str, object]) -> dict[str, object]:
    """Return the properties of arguments for which Triton compiles."""
    return {
        name: (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else type(x)
        for name, x in moving.items()
    }


@pytest.fixture
def seen(monkeypatch) -> dict[int, list[dict[str, object]]]:
    """Return the `compiled_for` of the calls of each Launch, by its id."""
    properties: dict[int, list[dict[str, object]]] = {}
    launched = Launch.__call__

    def watched(launch: Launch, moving: dict[str, object]) -> None:
        integers = {name for name, x in moving.items() if isinstance(x, int)}
        assert integers <= set(launch.kernel.kwargs.get("do_not_specialize", []))
        properties.setdefault(id(launch), []).append(compiled_for(moving))
        launched(launch, moving)

    monkeypatch.setattr(Launch, "__call__", watched)
    return properties


def one_kind_each(seen: dict[int, list[dict[str, object]]]) -> bool:
    return all(
        call == calls_of_launch[0] for calls_of_launch in seen.values() for call in calls_of_launch
    )


@interpreted
def test_calls_of_one_key_have_the_properties_for_which_triton_compiles(seen, empty_cache):
    for call, arguments in calls():
        arguments = {name: x for name, x in arguments.items() if x is not None}
        expected = call(**arguments)
        for variant in variants(arguments):
            for field, expected_field in zip(call(**variant), expected, strict=True):
                assert field is expected_field is None or torch.equal(field, expected_field)
    assert one_kind_each(seen)
    assert len(seen) > 15 and any(len(calls_of_launch) > 1 for calls_of_launch in seen.values())
    assert len(empty_cache) > 0


@interpreted
def test_a_key_without_alignment_would_be_seen(seen, monkeypatch):
    monkeypatch.setattr("fsbench.kernels.fused.api.launch_key", lambda *arguments: "one")
    arguments = next(calls())[1]
    for seed in (arguments["seed"], shifted(arguments["seed"])):
        flash_sample(**arguments | {"seed": seed})
    assert not one_kind_each(seen)


@interpreted
def test_a_cached_call_launches_nothing_where_no_kernel_runs(monkeypatch):
    hidden, weight = problem(B, V, D)
    call = partial(flash_sample, hidden, weight, seed=counter(3))
    expected = call().tokens
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(FusedLaunch, "__call__", None)
    assert call().tokens.tolist() == expected.tolist()


@interpreted
@pytest.mark.parametrize("index", [1, 4, 5, 6])
def test_no_tensor_is_kept_alive(index, empty_cache):
    call, arguments = list(calls())[index]
    for _ in range(2):
        call(**arguments)
    assert empty_cache
    alive = [weakref.ref(x) for x in arguments.values() if isinstance(x, Tensor)]
    arguments.clear()
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


@interpreted
def test_the_cache_does_not_grow_without_end(monkeypatch, empty_cache):
    monkeypatch.setattr(launch_cache, "MAX_KEYS", 2)
    hidden, weight = problem(B, V, D)
    for T in (1.0, 0.3, 0.0, torch.ones(B)):
        flash_sample(hidden, weight, seed=counter(0), temperature=T)
    assert len(empty_cache) == 1
