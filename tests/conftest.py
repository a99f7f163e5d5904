"""Where there is no GPU, Triton kernels run in the interpreter; tests that need a GPU are skipped.

The interpreter is chosen when a kernel is decorated, so it must be set before any is imported.
"""

import gc
import importlib.util
import os
import signal
from dataclasses import replace

import pytest
import torch

# What is imported stays: to look for garbage among it takes a third of the time of collection.
gc.disable()

# Ignored in a shell's background, and then in all processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        from faster_interpreter import make_faster

        make_faster()


@pytest.fixture(scope="module")
def one_thread():
    """For tests of small tensors: waking a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def effort(monkeypatch):
    """effort(tier, **changes): the checks of `fsbench verify` do less, or more, on a CPU."""
    from fsbench.verify.effort import EFFORTS

    def change(tier: str, **changes: object) -> None:
        monkeypatch.setitem(EFFORTS, (tier, "cpu"), replace(EFFORTS[tier, "cpu"], **changes))

    return change


@pytest.fixture
def eager(monkeypatch):
    """Compiled samplers without the compiler: their logic at many shapes in little time."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if item.get_closest_marker("gpu") and (interpreted or not torch.cuda.is_available()):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and no TRITON_INTERPRET"))
        if item.get_closest_marker("interpreter") and not interpreted:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 (make test)"))
