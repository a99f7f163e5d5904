"""Discover samplers: the only module that imports the files of kernels/ and baselines/.

A file at the top of either defines `PROVIDER`, named like its file; packages never are samplers.
Third parties add samplers through the entry-point group `fsbench.providers` (each entry point
names a Provider) or `--provider-path FILE.py`, whose file defines `PROVIDER` or, for several
samplers, `PROVIDERS`. Importing a sampler's module imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from pathlib import Path
from types import ModuleType

from fsbench.errors import InvalidArgument, ProviderUnavailable, describe, one_line, unknown_name
from fsbench.machine import hardware
from fsbench.problem import Problem
from fsbench.provider import Provider

ENTRY_POINTS = "fsbench.providers"
EXAMPLE = Problem(B=1, D=4096, V=151_936, dtype="bf16")
"""Decode step for which samplers are asked what they support and keep (Qwen3-8B's LM head)."""

PATIENCE_S = 60.0
"""Seconds that a plug-in may take to be imported and to answer."""

_SETTLE_S = 1.0  # for processes that a plug-in starts at import and that end by themselves
_NOT_CHOSEN = "it was not chosen for this run"
_PROBE = """
import json, sys
report, paths, *plug_in = sys.argv[1:]
sys.path[:] = json.loads(paths)
from fsbench.discover import probe
probe(int(report), *plug_in)
"""
_PACKAGES = ("fsbench.kernels", "fsbench.baselines")


@dataclass(frozen=True)
class Found:
    """A sampler, or a file or entry point without one: `broken` says why."""

    name: str
    source: str
    provider: Provider | None = None
    broken: str = ""

    def description(self) -> str:
        """Return the first sentence of the docstring of its file; "" without a docstring."""
        module = sys.modules.get(self.source) or sys.modules.get(_module_name(Path(self.source)))
        first = (module.__doc__ or "").strip().partition("\n\n")[0] if module else ""
        return one_line(first)

    def unavailable_reason(self, device: str) -> str | None:
        """Return why it cannot run on this machine's `device` (cuda or cpu), None if it can."""
        if self.provider is None:
            return self.broken
        try:
            reason = self.provider.missing_packages() or self.provider.not_built()
        except (Exception, SystemExit) as error:  # `not_built` may be a third party's
            reason = describe(error)
        if reason:
            return one_line(reason)
        if device not in self.provider.capabilities.devices:
            return f"runs on {', '.join(self.provider.capabilities.devices)} only"
        if device == "cuda":
            return self._gpu_problem()
        return None

    def _gpu_problem(self) -> str | None:
        """Return why no GPU of this machine fits, None if one does."""
        gpus = hardware.gpus()
        if not gpus:
            return "no GPU on this machine"
        needed = self.provider.compute_capability if self.provider else None
        capabilities = [gpu.compute_capability for gpu in gpus]
        if needed is None or needed in capabilities or None in capabilities:
            return None
        major, minor = needed
        return f"needs a GPU of compute capability {major}.{minor}"

    def refusal(self, problem: Problem, can_run: bool = True) -> tuple[str, str] | None:
        """Return (status, reason) of a cell that cannot be measured, None if it can.

        can_run: judge by this machine; otherwise by one that lacks nothing.
        """
        reason = self.unavailable_reason(problem.device) if can_run else self.broken
        if reason or self.provider is None:
            return "unavailable", reason or self.broken
        try:
            reason = self.provider.unsupported_reason(problem)
        except (Exception, SystemExit) as error:  # `supports` may be a third party's
            return "error", describe(error)
        return ("unsupported", one_line(reason)) if reason else None


def discover(
    extra_paths: Iterable[Path] = (), known_reasons: Mapping[str, str] | None = None
) -> dict[str, Found]:
    """Return all samplers by name, sorted. A plug-in that cannot be used is listed as broken.

    Args:
        known_reasons: `reasons` of another process: plug-ins are not probed again, and those that
            it lacks are not imported.

    Raises:
        InvalidArgument: an extra path is not a Python file, or its sampler has another's name.
    """
    entries = {entry.name: entry for entry in _shipped()}
    for entry in _from_entry_points(known_reasons):
        if entry.name in entries:  # installed somehow: the other commands must stay usable
            twice = f"defined twice, in {entries[entry.name].source} and {entry.source}"
            entry = Found(f"{entry.name} ({entry.source})", entry.source, broken=twice)
        entries[entry.name] = entry
    for entry in chain.from_iterable(_from_file(path, known_reasons) for path in extra_paths):
        if entry.name in entries:
            raise InvalidArgument(
                f"provider {entry.name!r}: defined twice, in {entries[entry.name].source} "
                f"and {entry.source}"
            )
        entries[entry.name] = entry
    return dict(sorted(entries.items()))


def names() -> set[str]:
    """Return the names of shipped samplers and of entry points, without importing any."""
    folders = [
        folder for package in _PACKAGES for folder in importlib.import_module(package).__path__
    ]
    shipped = {info.name for info in pkgutil.iter_modules(folders) if not info.ispkg}
    return shipped | {one_line(entry.name) for entry in entry_points(group=ENTRY_POINTS)}


def select(entries: dict[str, Found], names: Iterable[str]) -> list[Found]:
    """Return the named samplers, in that order; raise InvalidArgument for an unknown name."""
    chosen = []
    for name in names:
        if name not in entries:
            raise unknown_name("--provider", name, entries, "fsbench list")
        chosen.append(entries[name])
    return chosen


def available(entry: Found, device: str) -> Provider:
    """Return the provider; raise ProviderUnavailable with the reason if it cannot run."""
    reason = entry.unavailable_reason(device)
    if reason or entry.provider is None:
        raise ProviderUnavailable(f"{entry.name}: {reason}")
    return entry.provider


def reasons(entries: Iterable[Found]) -> dict[str, str]:
    """Return source -> why it cannot be used, "" if it can, for `discover` in another process."""
    known_reasons: dict[str, str] = {}
    for entry in entries:
        known_reasons[entry.source] = known_reasons.get(entry.source) or entry.broken
    return known_reasons


def _shipped() -> Iterable[Found]:
    for package_name in _PACKAGES:
        package = importlib.import_module(package_name)
        for info in pkgutil.iter_modules(package.__path__):
            if info.ispkg:  # what samplers are made of
                continue
            module_name = f"{package_name}.{info.name}"
            try:
                module = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                # A package that this sampler needs. Any other failure is a bug of ours: raised.
                if error.name is None or error.name.startswith("fsbench"):
                    raise
                yield Found(info.name, module_name, broken=f"package {error.name} is not installed")
                continue
            yield _checked(info.name, module_name, getattr(module, "PROVIDER", None))


def _from_entry_points(known_reasons: Mapping[str, str] | None) -> Iterable[Found]:
    for entry in entry_points(group=ENTRY_POINTS):
        source = f"entry point {entry.value}"
        yield from _plug_in(entry.name, source, ["entry", entry.value], known_reasons)


def _from_file(path: Path, known_reasons: Mapping[str, str] | None) -> list[Found]:
    if path.suffix != ".py" or not path.is_file():
        raise InvalidArgument(f"--provider-path: expected an existing .py file; got {path}")
    return _plug_in(path.stem, str(path), ["file", str(path)], known_reasons)


def _plug_in(
    name: str, source: str, target: list[str], known_reasons: Mapping[str, str] | None
) -> list[Found]:
    """Return the samplers of a plug-in: probed in a subprocess, then loaded."""
    name = one_line(name)
    if known_reasons is None:
        broken = _reason_against((name, source, *target), json.dumps(sys.path))
    else:
        broken = known_reasons.get(source, _NOT_CHOSEN)
    return [Found(name, source, broken=broken)] if broken else load(name, source, *target)


@cache
def _reason_against(plug_in: tuple[str, ...], paths: str) -> str:
    """Return why a plug-in cannot be used, "" if it can. plug_in: arguments of `load`."""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROBE, str(write_end), paths, *plug_in],
        pass_fds=[write_end],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(write_end)
    os.set_blocking(read_end, False)  # what it started may keep the other end open
    answer = b""
    try:
        code = process.wait(PATIENCE_S)
        with suppress(BlockingIOError):
            answer = os.read(read_end, 10_000)
    except subprocess.TimeoutExpired:
        return f"it hangs: not imported within {PATIENCE_S:g} s"
    finally:
        os.close(read_end)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code == 0 and answer:
        return str(json.loads(answer))
    return f"it ends the process, by {f'signal {-code}' if code < 0 else f'exit code {code}'}"


def load(name: str, source: str, kind: str, target: str) -> list[Found]:
    """Import a plug-in; return an entry with `broken` set if it raises or has no such sampler.

    kind: "entry" (target: MODULE:NAME) or "file" (target: its path). A file with PROVIDERS yields
        one entry for each. A process that it forks at import ends here.
    """
    process = os.getpid()
    try:
        with _alone(process), kept_stdout():
            if kind == "entry":
                entries = [_checked(name, source, EntryPoint(name, target, ENTRY_POINTS).load())]
            else:
                entries = _several(name, source, _imported(Path(target)))
            kept = [entry.provider.kept_bytes(EXAMPLE) for entry in entries if entry.provider]
    except (Exception, SystemExit) as error:
        return [Found(name, source, broken=describe(error))]
    for bytes_ in kept:
        if not (isinstance(bytes_, int) and bytes_ >= 0):
            broken = one_line(f"kept_bytes: expected bytes; got {bytes_!r}")
            return [Found(name, source, broken=broken)]
    return entries


def probe(report: int, *plug_in: str) -> None:
    """Load a plug-in, call what commands call, and write the reason against it as JSON."""
    try:
        broken = ""
        for entry in load(*plug_in):
            if entry.provider is not None:
                entry.unavailable_reason("cpu")
                with suppress(Exception, SystemExit):  # reported as a cell's status, when it is met
                    entry.provider.supports(EXAMPLE)
            broken = broken or entry.broken
        broken = broken or _left_running()
    except BaseException as error:
        broken = describe(error)
    os.write(report, json.dumps(broken).encode())


def _left_running() -> str:
    """Return a reason against a plug-in whose process still runs after the import, or ""."""
    end = time.monotonic() + _SETTLE_S
    try:
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
    except ChildProcessError:
        return ""
    return "it leaves a process running at import"


@contextmanager
def _alone(process: int) -> Iterator[None]:
    """End every forked copy of this process that leaves the block."""
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)


def _module_name(path: Path) -> str:
    return f"fsbench_plugin_{path.stem}"


def _imported(path: Path) -> ModuleType:
    """Import a file. A file that fails leaves no module behind."""
    module_name = _module_name(path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@contextmanager
def kept_stdout() -> Iterator[None]:
    """Send output of plug-ins to stderr, and restore the working folder."""
    folder = os.getcwd()
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.chdir(folder)


def _several(name: str, source: str, module: ModuleType) -> list[Found]:
    """Return the samplers of a file: PROVIDER, named like the file, or the PROVIDERS."""
    providers = getattr(module, "PROVIDERS", None)
    if providers is None:
        return [_checked(name, source, getattr(module, "PROVIDER", None))]
    if not (
        isinstance(providers, tuple)
        and providers
        and all(isinstance(p, Provider) for p in providers)
    ):
        broken = "PROVIDERS: expected a tuple of fsbench.provider.Provider, at least one"
        return [Found(name, source, broken=f"{broken}; got {one_line(providers)}")]
    if hasattr(module, "PROVIDER"):
        return [Found(name, source, broken="defines both PROVIDER and PROVIDERS")]
    return [Found(provider.name, source, provider) for provider in providers]


def _checked(name: str, source: str, provider: object) -> Found:
    if not isinstance(provider, Provider):
        return Found(name, source, broken="defines no PROVIDER of type fsbench.provider.Provider")
    if provider.name != name:
        return Found(name, source, broken=f"PROVIDER is named {provider.name!r}, not {name!r}")
    return Found(name, source, provider)
