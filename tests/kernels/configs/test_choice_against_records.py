"""The choice of a kernel, compared with every record that has timed both ways.

Cells whose tile shapes are no longer launched are left out: they are times of other code.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any, NamedTuple

import pytest
from cases.tile_shapes import TILES
from imitated_gpus import H100, H200, imitate_gpu
from tree import ROOT

from fsbench.kernels.configs import choice, screen_choice
from fsbench.kernels.configs.epilogue import DRAW, Epilogue
from fsbench.kernels.configs.hopper import HopperConfig

GPUS = {"h200": H200, "h100": H100}
"""Folder of results -> GPU."""
PORTABLE, HOPPER, SCREENED = "flash_sampling", "flash_sampling_hopper", "flash_sampling_screened"
TOKEN = "flash_sampling_token"
TOKEN_WAYS = ("token_portable", "token_hopper")
UNFILLED = "results/h200/token-noise-unfilled"
"""Times of token noise before hidden had all rows of a block."""
FILTERED, FILTERED_SCREENED = "flash_sampling_topk_topp", "flash_sampling_topk_topp_screened"
OF_OTHER_CODE = {"filtered_logprob": "h100/tile-shapes-20261127/filters_"}
"""Call -> the start of folders with times of code that has changed: before sums of teams."""
WITHIN = 1.015
"""Medians of one run closer than this are a tie."""
Times = dict[str, tuple[float, str]]
"""Provider -> (median in us, config)."""


class Cell(NamedTuple):
    folder: str
    B: int
    D: int
    V: int
    weights: str


@pytest.fixture(params=list(GPUS))
def gpu(request, monkeypatch):
    """The folder of a GPU's results, and its imitated device."""
    return request.param, imitate_gpu(monkeypatch, GPUS[request.param])


def records(gpu: str) -> dict[Cell, Times]:
    """Return the times of CUDA graphs."""
    cells: dict[Cell, Times] = defaultdict(dict)
    for path in sorted((ROOT / "results" / gpu).rglob("results.csv")):
        folder = path.parent.relative_to(ROOT).as_posix()
        if folder.startswith(UNFILLED):
            continue
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if (row["status"], row["tp"], row["graph"]) == ("ok", "1", "True"):
                    B, D, V = (int(row[name]) for name in ("b", "d", "v"))
                    cell = Cell(folder, B, D, V, row.get("weights", ""))
                    config = row["config"].removesuffix(" tma")
                    cells[cell][row["provider"]] = (float(row["median_us"]), config)
    return cells


def compare(
    gpu: str, ways: set[str], choose: Callable[[Cell], tuple[str, str | None]]
) -> tuple[int, list[Any]]:
    """Compare a choice of two providers with every cell that has both.

    GPUs of one kind can differ by more than a tie in which way is faster, so the records of a
    shape are compared together, by their geometric mean.

    Args:
        choose: cell -> (provider, its config, or None for any).

    Returns:
        The number of cells compared, and those of shapes for which the choice is slower, beyond a
        tie.
    """
    ratios: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for cell, times in records(gpu).items():
        if not ways <= times.keys():
            continue
        chosen, config = choose(cell)
        if config not in (None, times[chosen][1]):
            continue
        (other,) = ways - {chosen}
        shape = cell[1:]
        ratios[shape, chosen].append(times[chosen][0] / times[other][0])
    wrong = [(key, each) for key, each in ratios.items() if geometric_mean(each) > WITHIN]
    return sum(map(len, ratios.values())), wrong


def mean_times(records_of_shape: list[dict[str, float]]) -> dict[str, float]:
    """Return the geometric mean of each way that all records of a shape have timed."""
    timed = set.intersection(*map(set, records_of_shape))
    return {way: geometric_mean(each[way] for each in records_of_shape) for way in timed}


def test_the_faster_fused_kernel_is_chosen(gpu):
    folder, device = gpu

    def choose(cell: Cell) -> tuple[str, str]:
        size = 1 if cell.weights else 2
        shape = (cell.B, cell.D, cell.V)
        tiles = choice.config_for(*shape, device, size, True, "group", "auto", None)
        return HOPPER if isinstance(tiles, HopperConfig) else PORTABLE, str(tiles)

    compared, wrong = compare(folder, {PORTABLE, HOPPER}, choose)
    assert compared > 100
    assert not wrong


def test_the_screen_is_chosen_where_it_is_faster_than_the_weight_with_the_same_noise(gpu):
    folder, device = gpu

    def choose(cell: Cell) -> tuple[str, None]:
        screened, _ = screen_choice.worth_screening(cell.B, cell.V, cell.D, device)
        return SCREENED if screened else TOKEN, None

    compared, wrong = compare(folder, {SCREENED, TOKEN}, choose)
    assert compared >= 8
    assert not wrong


def test_the_fastest_way_to_token_noise_is_chosen(monkeypatch):
    """For a weight one of the two kernels, for a head also the screen; as in `compare`, together.

    Two H200s differ by 2 % in which of a head's ways is faster at 144 to 256 rows.
    """
    device = imitate_gpu(monkeypatch, GPUS["h200"])
    together = defaultdict(list)
    for cell, times in records("h200").items():
        if {*TOKEN_WAYS, SCREENED} <= times.keys():
            ways = {way: times[way][0] for way in (*TOKEN_WAYS, SCREENED)}
            together[cell.B, cell.D, cell.V].append(ways)
    compared, wrong = 0, []
    for shape, every in together.items():
        mean = mean_times(every)
        tiles = choice.config_for(*shape, device, 2, True, "token", "auto", None)
        of_weight = TOKEN_WAYS[isinstance(tiles, HopperConfig)]
        B, D, V = shape
        screened, _ = screen_choice.worth_screening(B, V, D, device)
        of_head = SCREENED if screened else of_weight
        for chosen, ways in ((of_weight, TOKEN_WAYS), (of_head, (*TOKEN_WAYS, SCREENED))):
            compared += len(every)
            if mean[chosen] > WITHIN * min(mean[way] for way in ways):
                wrong.append((shape, chosen))
    assert compared >= 144
    assert not wrong


def test_filters_are_from_the_screen_where_that_is_faster(gpu):
    folder, device = gpu

    def choose(cell: Cell) -> tuple[str, None]:
        screened, _ = screen_choice.worth_filtering(cell.B, cell.V, 20, device)
        return FILTERED_SCREENED if screened else FILTERED, None

    _, wrong = compare(folder, {FILTERED, FILTERED_SCREENED}, choose)
    assert not wrong


@pytest.mark.parametrize(
    ("folder", "call", "epilogue", "least"),
    [
        ("h100", "logprob", Epilogue(sums=True), 26),
        ("h100", "filtered", Epilogue(stored=True), 26),
        ("h100", "filtered_logprob", Epilogue(sums=True, stored=True), 26),
        ("h200", "plain", DRAW, 20),
        ("h200", "logprob", Epilogue(sums=True), 26),
        ("h200", "filtered", Epilogue(stored=True), 42),
        ("h200", "filtered_logprob", Epilogue(sums=True, stored=True), 70),
    ],
)
def test_the_fastest_tiles_are_chosen(monkeypatch, folder, call, epilogue, least):
    """By the geometric mean of the records of a shape, as in `compare`."""
    device = imitate_gpu(monkeypatch, GPUS[folder])
    names = {str(config): name for name, config in TILES.items()}
    together = defaultdict(list)
    for cell, times in records(folder).items():
        if "/tile-shapes-" not in cell.folder or f"{call}_chosen" not in times:
            continue
        if cell.folder.startswith(f"results/{OF_OTHER_CODE.get(call, '-')}"):
            continue
        if call == "filtered" and "/filters_" not in cell.folder:
            continue  # without filters no logits are stored
        names_of_ways = ("portable", "hopper", *TILES)
        ways = {way: times[f"{call}_{way}"][0] for way in names_of_ways if f"{call}_{way}" in times}
        job = cell.folder.rpartition("/")[2]  # with and without filters
        together[job, cell.B, cell.D, cell.V].append(ways)
    wrong = []
    for (job, *shape), every in together.items():
        mean = mean_times(every)
        tiles = choice.config_for(*shape, device, 2, True, "group", "auto", None, epilogue)
        hopper = isinstance(tiles, HopperConfig)
        chosen = names.get(str(tiles), "hopper") if hopper else "portable"
        if mean[chosen] > WITHIN * min(mean.values()):
            wrong.append((job, shape, chosen, mean))
    assert len(together) >= least
    assert not wrong
