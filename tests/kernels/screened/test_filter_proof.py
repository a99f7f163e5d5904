"""Filters from the screen: the claims of the proof hold at every launch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from filter_cases import matrices, roomy
from torch import Tensor

from fsbench.kernels import prepare_head, truncated_sample
from fsbench.kernels.device.stored_logits import largest_of_groups
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.screened import filter_kernels, filters
from fsbench.reference import processed_logits

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.interpreter]

SEED = torch.tensor([11])
DRAW = torch.Generator().manual_seed(5)


@pytest.fixture
def long_lists(monkeypatch):
    monkeypatch.setattr(filters, "filter_configs", roomy)
    monkeypatch.setattr(filters, "TILE", 512)  # so that programs share a row
    monkeypatch.setattr(launch_cache, "LAUNCHES", {})


class Stored:
    """Upper bounds after the first launch, and the logits that are filtered, of watched calls."""

    def __init__(self) -> None:
        self.upper = self.logits = self.largest = torch.empty(0)

    def __enter__(self) -> Stored:
        run, filter_logits = launch_cache.Launch.__call__, filters.FilterLaunch.__call__

        def watched(launch, moving):
            run(launch, moving)
            if launch.kernel is filter_kernels.filter_screen_kernel:
                self.upper = moving["logits_ptr"].clone()
                assert torch.equal(moving["largest_ptr"], largest_of_groups(self.upper))

        def kept(launch, call):
            self.logits, self.largest = call.stored.logits.clone(), call.stored.largest.clone()
            filter_logits(launch, call)

        self._patches = [
            mock.patch.object(launch_cache.Launch, "__call__", watched),
            mock.patch.object(filters.FilterLaunch, "__call__", kept),
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


def tight() -> tuple[Tensor, Tensor]:
    """Return a head whose copy is exact: tight bounds do not hide a fault."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, (700, 32), generator=draw).float()
    weight[:, 0] = 127
    hidden = torch.zeros(4, 32)
    hidden[:, :8] = torch.randint(-127, 128, (4, 8), generator=draw).float() * 256
    hidden[:, 8] = 127 * 256
    return hidden, weight


def test_with_tight_bounds(long_lists):
    assert_largest_are_exact(*tight(), 5)
