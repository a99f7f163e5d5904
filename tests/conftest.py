"""Where there is no GPU, Triton kernels run in the interpreter; tests that need a GPU are skipped.

The interpreter is chosen when a kernel is decorated, so it must be set before any is imported.
"""

import gc
import importlib.util
import os
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# What is imported stays: to look for garbage among it takes a third of the time of collection.
gc.disable()

# Ignored in a shell's background, and then in all processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, however long a busy machine takes to make and to try them.
settings.register_profile(
    "fsbench", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fsbench")

# What is printed and drawn does not depend on the shell that tests are started from.
for name in (
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS"),
    *("FSBENCH_TILES", "FSBENCH_VLLM", "FSBENCH_VLLM_MARKS", "FSBENCH_VLLM_DRAFTS"),
    "FSBENCH_COMMIT",
):
    os.environ.pop(name, None)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        from faster_interpreter import make_faster

        make_faster()


@pytest.fixture(autouse=True)
def same_numbers():
    """What a test draws without a seed does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


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


class _FailuresAtOnce:
    """Print the name of a test as soon as it fails: a long run may be stopped before its end."""

    def __init__(self, config: pytest.Config):
        self._reporter = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._reporter:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"FAILED {report.nodeid} ({report.when})")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config))


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
