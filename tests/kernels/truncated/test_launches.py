"""The table of truncated.launch: which kernels a call launches, counted."""

from __future__ import annotations

import re
from collections import Counter
from unittest import mock

import pytest
import torch
from flash_sample_cases import SEED, normal_logits, stored
from truncated_cases import history

from fsbench.kernels import Penalties, truncated_sample
from fsbench.kernels.truncated import launch, support, top_p

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

B, V = 2, 640  # 20 groups
ROWS = torch.tensor([0.9, 0.8])
MANY = torch.tensor([3, 0], dtype=torch.int32)
KERNELS = ("redraw", "look", "narrow", "cutoff", "race")
CASES = {
    "none, and tokens alone are asked for": [{}, {"top_k": -1, "top_p": 1.5, "min_p": -1.0}],
    "top_p alone, one number from 0.25 on": [{"top_p": 0.9}, {"top_p": 0.25, "min_p": -1.0}],
    "top_k, one number up to 448": [
        {"top_k": 3},
        {"top_k": 448, "top_p": 0.5},
        {"top_k": 3, "top_p": ROWS, "min_p": ROWS, "penalties": True},
    ],
    "neither top_k nor top_p": [
        {"min_p": 0.1},
        {"min_p": ROWS},
        {"penalties": True},
        {"return_kept": True},
        {"return_logprob": True, "min_p": 0.2},
    ],
    "top_k, one number up to 2048 and below the groups": [
        {"top_k": 500},
        {"top_k": 500, "top_p": 0.5},
    ],
    "others": [
        {"top_p": 0.9, "penalties": True},
        {"top_p": 0.9, "return_kept": True},
        {"top_k": 500, "groups": 20, "return_kept": True},
        {"top_p": ROWS, "return_support": 3},
    ],
    "others, where rows may be tested": [
        {"top_p": 0.2},
        {"top_p": 0.9, "min_p": 0.1},
        {"top_p": ROWS},
        {"top_k": MANY},
        {"top_k": 500, "groups": 20},
        {"top_k": MANY, "return_logprob": True},
    ],
}
"""By the beginning of a row of the table: calls that take these launches."""


def table() -> dict[str, tuple[str, ...]]:
    """Return the columns of each row by its filters."""
    cell = r" +(2 n - 1|\d|no|yes)"
    rows = re.findall(rf"^    (\S.*?) {cell * 5}$", launch.__doc__, re.M)
    return {row[0]: row[1:] for row in rows}


def test_every_row_of_the_table_has_cases():
    assert [name.removesuffix(" (*)") for name in table()] == list(CASES)


@pytest.mark.parametrize(("row", "call"), [(row, call) for row in CASES for call in CASES[row]])
def test_a_call_launches_what_the_table_says(row, call):
    call, groups = dict(call), call.get("groups")
    call.pop("groups", None)
    if call.pop("penalties", False):
        call["penalties"] = Penalties(history(B, V), 1.2)
    names: list[str] = []

    def count(kernel, *args, **kwargs):
        names.append(kernel.__name__)

    # More groups than top_k, unless the case says how many there are: V is small.
    launches_for = launch.launches_for
    with (
        mock.patch.object(launch, "launch_kernel", count),
        mock.patch.object(top_p, "launch_kernel", count),
        mock.patch.object(support, "launch_kernel", lambda *_, **__: None),
        mock.patch.object(
            launch, "launches_for",
            lambda filters, B, n, **flags: launches_for(filters, B, groups or 10_000, **flags),
        ),
    ):  # fmt: skip
        truncated_sample(**stored(normal_logits(B, V)), seed=SEED, **call)
    launched = Counter(name.removeprefix("sampling_").removesuffix("_kernel") for name in names)
    cells = next(cells for name, cells in table().items() if name.removesuffix(" (*)") == row)
    if "top_p" in call and cells[0] == "2 n - 1":
        cells = (str(2 * top_p.tests_needed(call["top_p"], B) - 1), *cells[1:])
    expected = [int({"no": "0", "yes": "1"}.get(cell, cell)) for cell in cells]
    assert [launched[kernel] for kernel in KERNELS] == expected
    assert sum(launched.values()) == sum(expected)
