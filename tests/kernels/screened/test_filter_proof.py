"""Filters from the screen: the claims of the proof hold at every launch, and faults break them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from filter_cases import matrices, roomy
from torch import Tensor

from fsbench.kernels import prepare_head, truncated_sample
from fsbench.kernels.device.stored_logits import largest_of_groups
from fsbench.kernels.screened import filter_kernels, filters
from fsbench.kernels.screened.score_bounds import known_logits
from fsbench.reference import processed_logits

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.interpreter]

SEED = torch.tensor([11])
DRAW = torch.Generator().manual_seed(5)


@pytest.fixture
def long_lists(monkeypatch):
    monkeypatch.setattr(filters, "filter_configs", roomy)
    monkeypatch.setattr(filters, "TILE", 512)  # so that programs share a row


class Stored:
    """Upper bounds after the first launch, and the logits that are filtered, of watched calls."""

    def __init__(self) -> None:
        self.upper = self.logits = self.largest = torch.empty(0)

    def __enter__(self) -> Stored:
        run, finish = filters.launch_kernel, filters.truncated.launch.finish

        def watched(kernel, *arguments, **named):
            run(kernel, *arguments, **named)
            if kernel is filter_kernels.filter_screen_kernel:
                self.upper = named["logits_ptr"].clone()
                assert torch.equal(named["largest_ptr"], largest_of_groups(self.upper))

        def kept(request, stored, *arguments):
            self.logits, self.largest = stored.logits.clone(), stored.largest.clone()
            finish(request, stored, *arguments)

        self._patches = [
            mock.patch.object(filters, "launch_kernel", watched),
            mock.patch.object(filters.truncated.launch, "finish", kept),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def assert_largest_are_exact(hidden: Tensor, weight: Tensor, k: int, **options: Any) -> None:
    """Assert the proof's claim: the k largest logits are exact, and others are below them."""
    with Stored() as stored:
        truncated_sample(hidden, prepare_head(weight), top_k=k, seed=SEED, **options)
    exact = processed_logits(hidden.float() @ weight.float().T, **options)
    V = exact.shape[1]
    assert (stored.upper[:, :V] >= exact).all() and (stored.upper[:, V:] == -torch.inf).all()
    kth = exact.topk(min(k, V)).values[:, -1:]
    logits = stored.logits[:, :V]
    assert torch.equal(logits[exact >= kth], exact[exact >= kth])
    assert (logits[exact < kth] < kth.expand_as(exact)[exact < kth]).all()
    assert torch.equal(stored.largest, largest_of_groups(stored.logits))


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (1, {"mask": torch.rand(4, 700, generator=DRAW) < 0.05}),
        (20, {"bias": torch.linspace(-2, 2, 700)}),
        (64, {}),
    ],
    ids=["mask", "bias", "no option"],
)
def test_the_k_largest_are_exact_and_others_below(k, options, long_lists):
    hidden, weight = matrices(4, 104, 700)
    weight[::7] *= 8  # rows with bad bounds among others
    assert_largest_are_exact(hidden, weight, k, **options)


true_least, true_known = filter_kernels._least_of_leaders, known_logits
true_leaders = filter_kernels._leaders
true_part, true_place = filter_kernels.part_of_list, filter_kernels.place_of_largest


# The interpreter calls these as Python functions.


def a_little_higher(*args):
    return true_least(*args) + 2**10


def of_one_less(leaders_ptr, k, leaders):
    return true_least(leaders_ptr, k - 1, leaders)


def the_same_of_all_groups(*args):
    token, exists = true_leaders(*args)
    return tl.max(token) + 0 * token, exists


def a_hundredth_of_the_bound(*args):
    y, bound = true_known(*args)
    return y, 0.01 * bound


def without_the_last(part, every, entries, *args):
    b, first, end = true_part(part, every, entries, *args)
    last = tl.sum(tl.where(every == b, entries, 0), 0)
    return b, first, tl.where(end == last, end - 1, end)


def of_another_row(group, row, B):
    return true_place(group, (row + 1) % B, B)


FAULTS = {
    "a threshold a little higher": (filter_kernels, "_least_of_leaders", a_little_higher),
    "a threshold of k - 1": (filter_kernels, "_least_of_leaders", of_one_less),
    "leaders of one group": (filter_kernels, "_leaders", the_same_of_all_groups),
    "bounds that are too small": (filter_kernels, "known_logits", a_hundredth_of_the_bound),
    "the last candidate left out": (filter_kernels, "part_of_list", without_the_last),
    "maxima of another row": (filter_kernels, "place_of_largest", of_another_row),
}


def tight() -> tuple[Tensor, Tensor]:
    """Return a head whose copy is exact: tight bounds do not hide a fault."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, (700, 32), generator=draw).float()
    weight[:, 0] = 127
    hidden = torch.zeros(4, 32)
    hidden[:, :8] = torch.randint(-127, 128, (4, 8), generator=draw).float() * 256
    hidden[:, 8] = 127 * 256
    return hidden, weight


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_is_seen(fault, long_lists, monkeypatch):
    monkeypatch.setattr(*fault)
    with pytest.raises(AssertionError):
        for hidden, weight in (tight(), matrices(4, 104, 700)):
            assert_largest_are_exact(hidden, weight, 5)


def test_the_cases_of_faults_pass_without_one(long_lists):
    for hidden, weight in (tight(), matrices(4, 104, 700)):
        assert_largest_are_exact(hidden, weight, 5)
