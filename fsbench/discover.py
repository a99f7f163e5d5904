"""Discover samplers: the only module that imports the files of kernels/ and baselines/.

A file at the top of either defines `PROVIDER`, named like its file; packages never are samplers.
Third parties add samplers through the entry-point group `fsbench.providers` (each entry point
names a Provider) or `--provider-path FILE.py`, whose file defines `PROVIDER` or, for several
samplers, `PROVIDERS`. Importing a sampler's module imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
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


def discover(extra_paths: Iterable[Path] = ()) -> dict[str, Found]:
    """Return all samplers by name, sorted. A plug-in that cannot be used is listed as broken.

    Raises:
        InvalidArgument: an extra path is not a Python file, or its sampler has another's name.
    """
    entries = {entry.name: entry for entry in _shipped()}
    for entry in _from_entry_points():
        if entry.name in entries:  # installed somehow: the other commands must stay usable
            twice = f"defined twice, in {entries[entry.name].source} and {entry.source}"
            entry = Found(f"{entry.name} ({entry.source})", entry.source, broken=twice)
        entries[entry.name] = entry
    for entry in chain.from_iterable(map(_from_file, extra_paths)):
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
    """Return the named samplers, in that order.

    Raises:
        InvalidArgument: a name is unknown. The user's files that cannot be used are named too,
            since one of them may define it.
    """
    chosen = []
    for name in names:
        if name not in entries:
            error = unknown_name("--provider", name, entries, "fsbench list")
            files = [
                f"; {entry.source}: {entry.broken}"
                for entry in entries.values()
                if entry.broken and entry.source.endswith(".py")
            ]
            raise InvalidArgument(str(error) + "".join(files))
        chosen.append(entries[name])
    return chosen


def available(entry: Found, device: str) -> Provider:
    """Return the provider; raise ProviderUnavailable with the reason if it cannot run."""
    reason = entry.unavailable_reason(device)
    if reason or entry.provider is None:
        raise ProviderUnavailable(f"{entry.name}: {reason}")
    return entry.provider


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


def _from_entry_points() -> Iterable[Found]:
    for entry in entry_points(group=ENTRY_POINTS):
        yield from load(one_line(entry.name), f"entry point {entry.value}", entry)


def _from_file(path: Path) -> list[Found]:
    if path.suffix != ".py" or not path.is_file():
        raise InvalidArgument(f"--provider-path: expected an existing .py file; got {path}")
    return load(one_line(path.stem), str(path), path)


def load(name: str, source: str, plug_in: EntryPoint | Path) -> list[Found]:
    """Import a plug-in; return an entry with `broken` set if it raises or has no such sampler.

    A file with PROVIDERS yields one entry for each.
    """
    try:
        with kept_stdout():
            if isinstance(plug_in, EntryPoint):
                entries = [_checked(name, source, plug_in.load())]
            else:
                entries = _several(name, source, _imported(plug_in))
            for entry in entries:
                if entry.provider and not (kept := entry.provider.kept_bytes(EXAMPLE)) >= 0:
                    raise InvalidArgument(f"kept_bytes: expected bytes; got {kept}")
    except (Exception, SystemExit) as error:
        return [Found(name, source, broken=describe(error))]
    return entries


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
