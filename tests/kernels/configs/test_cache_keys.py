"""Keys of compiled kernels do not depend on what was compiled before."""

from __future__ import annotations

from triton.runtime.jit import DependenciesFinder

from fsbench.kernels.configs import cache_keys


class Finder:
    """Of a kernel. used_global_vals: what its key has, by name."""

    def __init__(self):
        self.used_global_vals = {}


class Called:
    """A device function. Its globals are known once it is hashed, as in Triton."""

    def __init__(self):
        self.used_global_vals = {}

    @property
    def cache_key(self):
        self.used_global_vals["WINDOW"] = 32
        return "hash"


def collects_too_early(self, func):
    """Triton 3.6's order."""
    self.used_global_vals.update(func.used_global_vals)
    assert func.cache_key


def test_the_globals_of_a_function_that_was_never_called_are_in_the_key(monkeypatch):
    monkeypatch.setattr(DependenciesFinder, "_update_hash", collects_too_early)
    first, again, called = Finder(), Finder(), Called()
    cache_keys.settle()
    cache_keys.settle()
    for finder in (first, again):
        DependenciesFinder._update_hash(finder, called)
    assert first.used_global_vals == again.used_global_vals == {"WINDOW": 32}


def test_importing_the_kernels_settles_them():
    import fsbench.kernels.noise  # noqa: F401

    assert hasattr(DependenciesFinder._update_hash, "__wrapped__")
