"""Shared fixtures. Without a GPU, kernels run in Triton's interpreter and GPU tests are skipped.

Triton chooses the interpreter when a kernel is decorated, so the variable is set before imports.
"""

import gc
import importlib.util
import os
import random
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Many tests start Python, and without cached bytecode each process compiles fsbench again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Imported modules are never freed; scanning them for garbage takes a third of collection time.
gc.disable()

# A shell ignores SIGINT in background jobs, and every process that a test starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis tries the same examples in every run, and a busy machine fails no deadline.
settings.register_profile(
    "fsbench", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fsbench")

# Output and results must not depend on the environment of the shell that starts the tests.
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
elif importlib.util.find_spec("triton"):
    from compile_once import compile_once

    compile_once()


@pytest.fixture(autouse=True)
def same_numbers():
    """Seed the global generators, so that a test does not depend on earlier tests."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: for small tensors, waking a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def effort(monkeypatch):
    """Return effort(tier, **changes), which changes the CPU work of a tier of `fsbench verify`."""
    from fsbench.verify.effort import EFFORTS

    def change(tier: str, **changes: object) -> None:
        monkeypatch.setitem(EFFORTS, (tier, "cpu"), replace(EFFORTS[tier, "cpu"], **changes))

    return change


@pytest.fixture
def eager(monkeypatch):
    """Replace torch.compile by the identity: tests check samplers, not the compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


class _FailuresAtOnce:
    """Print the name of a test as soon as it fails, because a long run may be stopped early."""

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


_sessions: list[pytest.Session] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    _sessions.append(session)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process here: collecting garbage and taking down torch would cost seconds of CPU."""
    config.get_terminal_writer().flush()
    for session in _sessions:
        os._exit(int(session.exitstatus))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if item.get_closest_marker("gpu") and (interpreted or not torch.cuda.is_available()):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and no TRITON_INTERPRET"))
        if item.get_closest_marker("interpreter") and not interpreted:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 (make test)"))
