"""The choice of a kernel, compared with every record that has timed both ways.

Cells whose tile shapes are no longer launched are left out: they are times of other code.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tree import ROOT

from fsbench.kernels.configs import choice, screen_choice
from fsbench.kernels.configs.hopper import HopperConfig

GPUS = {"h200": ("NVIDIA H200", 64), "h100": ("NVIDIA H100 80GB HBM3", 128)}
"""Names, and portable_rows, which need the clocks of a GPU."""
PORTABLE, HOPPER, SCREENED = "flash_sampling", "flash_sampling_hopper", "flash_sampling_screened"
TOKEN = "flash_sampling_token"
FILTERED, FILTERED_SCREENED = "flash_sampling_topk_topp", "flash_sampling_topk_topp_screened"
WITHIN = 1.015
"""Medians of one run closer than this are a tie."""
SLOWER = {
    # One batch size; from 72 rows on the portable kernel is within the tie, or faster.
    ("h100", 65, 4096, 151936): 1.04,
}
"""Known cells (GPU, B, D, V) in which the choice is slower, and by how much at most."""

Times = dict[str, tuple[float, str]]


@pytest.fixture(params=list(GPUS))
def gpu(request, monkeypatch):
    """The name of a GPU and an imitated device of it."""
    name, rows = GPUS[request.param]
    facts = SimpleNamespace(
        name=name, shared_memory_per_block_optin=232448, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choice, "portable_rows", lambda device: rows)
    monkeypatch.setattr(choice, "multiprocessors", lambda device: 132)
    # Choices are cached by device; no other test has these.
    return request.param, torch.device("cuda", 40 + list(GPUS).index(request.param))


def records(gpu: str) -> dict[tuple[str, int, int, int, str], Times]:
    """Return {(folder, B, D, V, weights): {provider: (median in us, config)}}, of CUDA graphs."""
    cells: dict[Any, Times] = defaultdict(dict)
    for path in sorted((ROOT / "results" / gpu).rglob("results.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if (row["status"], row["tp"], row["graph"]) == ("ok", "1", "True"):
                    shape = (int(row["b"]), int(row["d"]), int(row["v"]), row.get("weights", ""))
                    place = (path.parent.relative_to(ROOT).as_posix(), *shape)
                    config = row["config"].removesuffix(" tma")
                    cells[place][row["provider"]] = (float(row["median_us"]), config)
    return cells


def slower(gpu: str, shape: tuple[int, int, int], chosen: float, other: float) -> bool:
    """Whether a choice is slower than the other way, beyond a tie and what is known."""
    return chosen / other > SLOWER.get((gpu, *shape), WITHIN)


def test_the_faster_fused_kernel_is_chosen(gpu):
    name, device = gpu
    compared, wrong = 0, []
    for (folder, B, D, V, weights), times in records(name).items():
        if not {PORTABLE, HOPPER} <= times.keys():
            continue
        size = 1 if weights else 2
        tiles = choice.config_for(B, D, V, device, size, True, "group", "auto", None, False, False)
        chosen, other = (
            (HOPPER, PORTABLE) if isinstance(tiles, HopperConfig) else (PORTABLE, HOPPER)
        )
        if times[chosen][1] != str(tiles):
            continue
        compared += 1
        if slower(name, (B, D, V), times[chosen][0], times[other][0]):
            wrong.append((folder, B, D, V, chosen, times))
    assert compared > 100
    assert not wrong


def test_the_screen_is_chosen_where_it_is_faster_than_the_weight_with_the_same_noise(gpu):
    name, _ = gpu
    compared, wrong = 0, []
    for (folder, B, D, V, _), times in records(name).items():
        if not {SCREENED, TOKEN} <= times.keys():
            continue
        compared += 1
        screened = screen_choice.worth_screening(B, V, D, (9, 0))[0]
        ways = times[SCREENED][0], times[TOKEN][0]
        if slower(name, (B, D, V), *(ways if screened else ways[::-1])):
            wrong.append((folder, B, D, V, screened, ways))
    assert compared >= 8
    assert not wrong


def test_filters_are_from_the_screen_where_that_is_faster(gpu):
    name, _ = gpu
    wrong = []
    for (folder, B, D, V, _), times in records(name).items():
        if {FILTERED, FILTERED_SCREENED} <= times.keys():
            screened = screen_choice.worth_filtering(B, V, 20, (9, 0))[0]
            ways = times[FILTERED_SCREENED][0], times[FILTERED][0]
            if slower(name, (B, D, V), *(ways if screened else ways[::-1])):
                wrong.append((folder, B, D, V, screened, ways))
    assert not wrong
