"""The C++ core (csrc/) by ctypes: is it there, and its functions with their types.

Plain C functions in a shared library that `pip install` builds next to this file, if there is a C++
compiler. Not a torch extension: those must be built against the very torch that loads them, which
an install by pip in an isolated environment does not know; this library knows neither torch nor
Python, so one build serves all of their versions, and compiles in seconds.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from fsbench.errors import ProviderUnavailable

ISAS = ("portable", "avx2", "avx512")
"""The instruction sets that the core has code for; the best that the CPU has is used."""

UNDEFINED, NEEDS_TAIL = -1, -2
"""Tokens that are none: of a row without a softmax, and of one that needs its tail's logits."""


class CRing(ctypes.Structure):
    """`Ring` of csrc/ring.h, field by field."""

    _fields_ = (
        *((name, c_int32) for name in ("slots", "rows", "vocab", "shards", "elements", "spin_us")),
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
    "fsb_rows": (None, (POINTER(CRing), c_int, c_int, c_int, c_void_p)),
    "fsb_publish": (c_uint32, (POINTER(CRing), c_int)),
    "fsb_wait": (c_int, (POINTER(CRing), c_uint32, c_int, c_int64)),
    "fsb_plane_new": (c_void_p, (POINTER(CRing), c_int, c_int, c_void_p)),
    "fsb_plane_delete": (None, (c_void_p,)),
    "fsb_plane_begin": (
        None,
        (c_void_p, c_int, c_void_p, c_int64, c_float, c_float, c_float),
    ),
    "fsb_plane_output": (None, (c_void_p, c_int, c_int64)),
}


def missing() -> str | None:
    """None if the core can be loaded, else why not and what to do. Loads nothing."""
    return None if _library() else "not built: needs g++ at install"


def _library() -> Path | None:
    """Where the build puts the library: beside this file, under one of Python's suffixes."""
    here = Path(__file__).parent
    found = (here / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next(filter(Path.exists, found), None)


@cache
def core() -> ctypes.CDLL:
    """The library, its functions typed. Raises ProviderUnavailable where it cannot be loaded."""
    reason = missing()
    if reason:
        raise ProviderUnavailable(
            f"fsbench.simple: {reason}; with a C++ compiler there, install fsbench again"
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
    """Which of ISAS runs."""
    return core().fsb_isa().decode()
