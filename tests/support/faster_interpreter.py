"""Makes Triton's interpreter, which tests of kernels wait for, twice as fast; results are its own.

Of another Triton that does not have these functions nothing is replaced: tests take longer then.
"""

from __future__ import annotations

import numpy as np
from triton.runtime import interpreter

tl = interpreter.tl


def make_faster() -> None:
    for of, name, replacement in (
        (interpreter, "_patch_lang", patch_once_a_launch),
        (interpreter, "_get_np_dtype", look_up_once),
        (interpreter.ReduceOps, "generic_reduce", reduce_by_halves),
    ):
        if hasattr(of, name):
            setattr(of, name, replacement(getattr(of, name)))


def patch_once_a_launch(patch):
    """A launch replaces the functions of triton.language by the interpreter's.

    Triton does so anew at every call of a device function in it, `tl.max` among them, each time
    searching all names of the language.
    """

    def patch_unless_done(fn):
        # Our device functions see tl, which the end of a launch restores; those of Triton tl.core.
        if tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load):
            return patch(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    return patch_unless_done


def look_up_once(np_dtype):
    """Triton makes a table of all dtypes at every look-up."""
    known: dict[str, np.dtype] = {}

    def look_up(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype(dtype)
        return known[name]

    return look_up


def reduce_by_halves(reduce):
    """tl.reduce with a function of our own: as on a GPU, neighbours are combined until one is left.

    Triton's interpreter calls the function for each element.
    """

    def halved(self, data):
        size = data[0].handle.data.shape[self.axis]
        neighbours = [
            self.to_tensor(x.handle.data.take(range(first, size, 2), self.axis), x.dtype)
            for first in (0, 1)
            for x in data
        ]
        combined = self.combine_fn.fn(*neighbours)
        return combined if isinstance(combined, tuple) else (combined,)

    def reduced(self, data):
        while self.axis is not None and data[0].handle.data.shape[self.axis] > 1:
            data = halved(self, data)
        return reduce(self, data)  # of one element along the axis

    return reduced
