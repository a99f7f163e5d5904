"""Direct launches: the C function gets the arguments that Triton would pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fsbench.kernels.launch import launch_cache as module
from fsbench.kernels.launch.launch_cache import direct_launch

BEFORE = [7, 1, 1, 40, "function", False, True, None, None, "metadata", None, None, None]
"""Of grid (7,) on stream 40."""


def descriptor(address: int) -> SimpleNamespace:
    return SimpleNamespace(address=address)


class Driver:
    """A double of triton.backends.nvidia.driver that records the arguments of the C function."""

    _BASE_ARGS_FORMAT = "iiiKKppOOOOOO"

    def __init__(self) -> None:
        self.launched: list[list[object]] = []
        self.encoded: list[int] = []
        self.stream = 40

    def make_tensordesc_arg(self, value: SimpleNamespace, described: str) -> list[object]:
        self.encoded.append(value.address)
        return [f"{described} at {value.address}", 8, 64]

    def launch(self, *arguments: object) -> None:
        self.launched.append(list(arguments))


class Launcher:
    """Triton 3.6's CudaLauncher: descriptors, if there are any, are laid out before C is called."""

    launch_cooperative_grid = False
    launch_pdl = True
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, driver: Driver, descriptors: int) -> None:
        launcher, tensordesc_meta = driver.launch, ["hidden", "weight"][:descriptors]
        tensordesc_indices = set(range(descriptors))

        def inner(*arguments: object) -> object:
            return launcher, tensordesc_meta, tensordesc_indices

        self.launch = inner if descriptors else launcher


Launcher.__module__ = "triton.backends.nvidia.driver"


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, run: object) -> None:
        self.run = run
        self.by_triton: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        assert grid == (7, 1, 1)
        return lambda *arguments: self.by_triton.append(arguments)


@pytest.fixture
def driver(monkeypatch):
    double = Driver()
    active = SimpleNamespace(
        get_current_device=lambda: 2,
        get_current_stream=lambda device: double.stream * (device == 2),
    )
    hooks = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[])
    )
    triton = SimpleNamespace(
        runtime=SimpleNamespace(driver=SimpleNamespace(active=active)),
        knobs=SimpleNamespace(runtime=hooks),
    )
    double.hooks = hooks
    monkeypatch.setattr(module, "triton", triton)
    monkeypatch.setattr(module, "import_module", lambda name: double)
    return double


def test_moving_arguments_are_inserted_among_the_constant_ones(driver):
    compiled = Compiled(Launcher(driver, 0))
    launch = direct_launch(compiled, (7,), [None, "fixed", None, 3], [2, 0])
    launch([0.5, 1024])
    driver.stream = 41
    launch([0.7, 2048])
    assert driver.launched[0] == [*BEFORE, 1024, "fixed", 0.5, 3]
    assert driver.launched[1] == [*BEFORE[:3], 41, *BEFORE[4:], 2048, "fixed", 0.7, 3]
    assert not compiled.by_triton


def test_descriptors_are_laid_out_and_encoded_once(driver):
    hidden, weight, other = map(descriptor, (16, 32, 48))
    compiled = Compiled(Launcher(driver, 2))
    launch = direct_launch(compiled, (7,), [hidden, weight, None], [0, 1, 2])
    driver.encoded.clear()
    for first in (hidden, other, hidden, other):
        launch([first, weight, 0.5])
    assert sorted(driver.encoded) == [16, 32, 48]
    of_weight = ["weight at 32", 8, 64, 0.5]
    assert driver.launched[2] == [*BEFORE, "hidden at 16", 8, 64, *of_weight]
    assert driver.launched[3] == [*BEFORE, "hidden at 48", 8, 64, *of_weight]


def test_the_cache_of_descriptors_is_bounded(driver, monkeypatch):
    monkeypatch.setattr(module, "MAX_KEYS", 2)
    launch = direct_launch(Compiled(Launcher(driver, 1)), (7,), [descriptor(0)], [0])
    for address in (16, 32, 48, 16):
        launch([descriptor(address)])
    assert [arguments[-3] for arguments in driver.launched] == [
        f"hidden at {address}" for address in (16, 32, 48, 16)
    ]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called_by_triton(driver, name):
    compiled = Compiled(Launcher(driver, 0))
    launch = direct_launch(compiled, (7,), [None, 3], [0])
    getattr(driver.hooks, name).calls.append(print)
    launch([0.5])
    assert compiled.by_triton == [(0.5, 3)] and not driver.launched


def test_another_launcher_launches_by_triton(driver):
    needs_memory = Launcher(driver, 0)
    needs_memory.global_scratch_size = 8
    runs = [needs_memory, SimpleNamespace(), Launcher(driver, 0)]
    for run in runs:
        if run is runs[-1]:
            driver._BASE_ARGS_FORMAT = "another"
        compiled = Compiled(run)
        direct_launch(compiled, (7,), [None, 3], [0])([0.5])
        assert compiled.by_triton == [(0.5, 3)]
    assert not driver.launched
