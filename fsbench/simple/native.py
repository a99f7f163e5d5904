"""Load the C++ core (csrc/) with ctypes.

`pip install` builds it next to this file, if there is a C++ compiler. It is a plain shared library,
not a torch extension: one build serves all versions of torch and Python, and compiles in seconds.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from fsbench.errors import ProviderUnavailable

ISAS = ("portable", "avx2", "avx512")
"""Instruction sets that the core has code for. It uses the widest that the CPU has."""

UNDEFINED, NEEDS_TAIL = -1, -2
"""Results in place of a token: a row without a softmax, and a row that needs its tail's logits."""


class CRing(ctypes.Structure):
    """`Ring` of csrc/ring.h, field by field."""

    _fields_ = (
        *((name, c_int32) for name in ("slots", "rows", "vocab", "elements")),
        *(
            (name, c_void_p)
            for name in (
                *("logits", "uniform", "temperature", "top_p", "min_p", "top_k"),
                *("tail_max", "tail_sum", "request", "shape", "tokens", "logprob"),
                *("work", "done", "state"),
            )
        ),
    )


_FUNCTIONS = {
    "fsb_ring_size": (c_int, ()),
    "fsb_isa": (c_char_p, ()),
    "fsb_use_isa": (c_int, (c_char_p,)),
    "fsb_uniforms": (None, (c_void_p, c_int64, c_void_p, c_int64, c_int64)),
    "fsb_rows": (None, (POINTER(CRing), c_int, c_int, c_int)),
    "fsb_publish": (c_uint32, (POINTER(CRing), c_int)),
    "fsb_wait": (c_int, (POINTER(CRing), c_uint32, c_int, c_int64)),
    "fsb_plane_new": (c_void_p, (POINTER(CRing), c_int, c_int)),
    "fsb_plane_delete": (None, (c_void_p,)),
    "fsb_plane_begin": (
        None,
        (c_void_p, c_int, c_void_p, c_int64, c_float, c_float, c_float),
    ),
    "fsb_plane_output": (None, (c_void_p, c_int, c_int64)),
}


def missing() -> str | None:
    """Return why the core cannot be loaded, or None if it can. Loads nothing."""
    return None if _library() else "not built: needs g++ at install"


def _library() -> Path | None:
    """Return the built library: next to this file, with one of Python's suffixes."""
    folder = Path(__file__).parent
    paths = (folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next(filter(Path.exists, paths), None)


@cache
def core() -> ctypes.CDLL:
    """Return the library with typed functions; raise ProviderUnavailable if it cannot be loaded."""
    reason = missing()
    if reason:
        raise ProviderUnavailable(
            f"fsbench.simple: {reason}; install a C++ compiler, then fsbench again"
        )
    path = _library()
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        size = library.fsb_ring_size()
    except (OSError, AttributeError) as error:
        raise ProviderUnavailable(f"fsbench.simple: {path}: {error}") from error
    if size != ctypes.sizeof(CRing):
        raise ProviderUnavailable(
            f"fsbench.simple: {path} is of another version; install fsbench again"
        )
    return library


def isa() -> str:
    """Return which of ISAS the core uses."""
    return core().fsb_isa().decode()
