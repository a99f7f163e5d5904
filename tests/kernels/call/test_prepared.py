"""Launches past Triton's binder: what is told apart, and what is passed on."""

from __future__ import annotations

import weakref
from contextlib import suppress
from unittest import mock

import pytest
import torch

from fsbench.kernels.call.prepared import PreparedLaunch, kind_of, launch_kernel
from fsbench.kernels.call.quantised import quantise_head
from fsbench.kernels.call.request import checked_request

B, D, V = 16, 32, 320


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
def launch():
    return PreparedLaunch(Kernel(), (7,), {"fixed": "F"})


def test_the_second_launch_passes_the_binder_with_its_own_arguments(launch):
    words = torch.zeros(32, dtype=torch.int64)
    for first, number in ((words, 0.5), (words[2:], 0.7)):
        launch(second=number, first=first, third=None)
    assert [set(each) for each in launch.kernel.bound] == [{"first", "fixed", "second", "third"}]
    assert launch.kernel.direct == [(words[2:].data_ptr(), "F", 0.7, None)]


def test_what_triton_compiles_for_is_bound_anew(launch):
    words = torch.zeros(32, dtype=torch.int64)
    halves = words.half()
    for first in (words, words[1:], halves):
        for third in (None, words, words[1:], 16, 17):
            launch(first=first, second=0.5, third=third)
    assert len(launch.kernel.bound) == 3 * 5 and not launch.kernel.direct


def test_no_tensor_is_kept_alive(launch):
    words = torch.zeros(32, dtype=torch.int64)
    launch.kernel._bind = lambda **arguments: launch.kernel
    alive = weakref.ref(words)
    launch(first=words, second=0.5, third=None)
    del words
    assert alive() is None


def request(**changes: object):
    given = {"hidden": torch.zeros(B, D), "weight": torch.zeros(V, D)}
    given |= {"seed": torch.zeros(1, dtype=torch.int64), "temperature": 1.0}
    given |= dict.fromkeys(("offset", "soft_cap", "bias", "mask", "vocab_size")) | changes
    return checked_request(given.pop("hidden"), given.pop("weight"), **given)


KINDS = [
    {},
    {"hidden": torch.zeros(B + 1, D)},
    {"hidden": torch.zeros(B, D).half(), "weight": torch.zeros(V, D).half()},
    {"hidden": torch.zeros(B, D + 1), "weight": torch.zeros(V, D + 1)},
    {"weight": torch.zeros(V + 1, D)},
    {"seed": torch.zeros(B, dtype=torch.int64)},
    {"offset": torch.zeros(1, dtype=torch.int64)},
    {"offset": torch.zeros(B, dtype=torch.int64)},
    {"temperature": 0.0},
    {"temperature": torch.ones(B)},
    {"soft_cap": 3.0},
    {"bias": torch.zeros(V)},
    {"bias": torch.zeros(V).half()},
    {"bias": torch.zeros(B, V)},
    {"mask": torch.ones(B, V, dtype=torch.bool)},
    {"mask": torch.ones(B, V // 32, dtype=torch.int32)},
    {"mask": torch.ones(B, V // 32 + 1, dtype=torch.int32)},
    {"vocab_size": V - 1},
    {"num_samples": 2},
    {"noise": "token"},
]


def test_kinds_differ_by_all_that_decides_a_launch():
    kinds = [kind_of(request(**changes)) for changes in KINDS]
    kinds.append(kind_of(request()._replace(merge_later=True)))
    for dtype in (torch.int8, torch.float8_e4m3fn):
        head = quantise_head(torch.zeros(V, D), dtype)
        kinds.append(kind_of(request(weight=head, may_be_quantised=True)))
    head = quantise_head(torch.zeros(V, D), per_row=False)
    kinds.append(kind_of(request(weight=head, may_be_quantised=True)))
    assert len(set(kinds)) == len(kinds)


def test_a_float_is_of_one_kind_whatever_its_size():
    assert kind_of(request(temperature=0.3)) == kind_of(request(temperature=2))
    assert kind_of(request(soft_cap=1.0)) == kind_of(request(soft_cap=30))


def test_only_what_is_alike_is_launched_past_the_binder():
    kernel, device = Kernel(), torch.device("cpu")

    def launch(**changes):
        arguments = {"first": None, "fixed": "F", "second": 0.5, "third": 3} | changes
        launch_kernel(kernel, arguments.pop("device", device), (7,), **arguments)

    launch()
    launch(second=0.7)
    assert len(kernel.bound) == 1 and kernel.direct == [(None, "F", 0.7, 3)]
    changes = [{"fixed": "G"}, {"third": 4}, {"third": 1.0}, {"first": 1.0}]
    for change in [*changes, {"device": torch.device("cuda", 1)}]:
        launch(**change)
    assert len(kernel.bound) == 6 and len(kernel.direct) == 1


def test_a_first_launch_that_fails_is_tried_again():
    kernel = Kernel()
    kernel._bind = mock.Mock(side_effect=[RuntimeError("out of memory"), kernel])
    for _ in range(2):
        with suppress(RuntimeError):
            launch_kernel(kernel, torch.device("cpu"), (7,), **dict.fromkeys(Kernel.arg_names))
    assert kernel._bind.call_count == 2
