"""Keys of compiled kernels do not depend on what was compiled before."""

from __future__ import annotations

from triton.runtime.jit import DependenciesFinder

from fsbench.kernels.configs import cache_keys


class Kernel:
    """A kernel of Triton: `used_global_vals` has the globals of its key, by name."""

    def __init__(self):
        self.used_global_vals = {}


class DeviceFunction(Kernel):
    """A function that a kernel calls; as in Triton, its globals are found by hashing it."""

    @property
    def cache_key(self):
        self.used_global_vals["WINDOW"] = 32
        return "hash"


def collect_too_early(self, func):
    """Triton 3.6's order."""
    self.used_global_vals.update(func.used_global_vals)
    assert func.cache_key


def test_the_globals_of_a_function_that_was_never_called_are_in_the_key(monkeypatch):
    monkeypatch.setattr(DependenciesFinder, "_update_hash", collect_too_early)
    first, second, function = Kernel(), Kernel(), DeviceFunction()
    cache_keys.settle()
    cache_keys.settle()
    for kernel in (first, second):
        DependenciesFinder._update_hash(kernel, function)
    assert first.used_global_vals == second.used_global_vals == {"WINDOW": 32}


def test_importing_the_kernels_settles_them():
    import fsbench.kernels.noise  # noqa: F401

    assert hasattr(DependenciesFinder._update_hash, "__wrapped__")
