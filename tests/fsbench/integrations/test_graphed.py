"""Batch sizes of the graphs; that they draw as without is in test_graphed_gpu.py."""

from __future__ import annotations

import pytest

from fsbench.integrations.graphed import sizes_up_to


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 100, 256, 1000, 1024])
def test_every_batch_has_a_graph_that_is_not_much_larger(rows):
    sizes = sizes_up_to(rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == rows
    for B in range(1, rows + 1):
        size = next(size for size in sizes if size >= B)
        assert size - B < max(2, 8 if B < 64 else 16 if B < 256 else 64)


def test_there_are_few():
    assert len(sizes_up_to(1024)) < 40
