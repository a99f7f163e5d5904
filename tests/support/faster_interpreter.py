"""Makes Triton's interpreter, which tests of kernels wait for, several times as fast.

Its results stay its own. Of another Triton that does not have these functions, or whose tensors
have other fields, nothing is replaced: tests take longer then.
"""

from __future__ import annotations

import builtins
import dataclasses
import math

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

tl = interpreter.tl


def make_faster() -> None:
    for of, name, replacement in (
        (interpreter, "_patch_lang", patch_once_a_launch),
        (interpreter, "_get_np_dtype", look_up_once),
        (interpreter.ReduceOps, "generic_reduce", reduce_by_halves),
        (core, "_unwrap_if_constexpr", unwrap_by_type),
        (TritonSemantic, "broadcast_impl_value", leave_equal_shapes),
        (TritonSemantic, "binary_op_type_checking_impl", leave_equal_types),
    ):
        if hasattr(of, name):
            setattr(of, name, replacement(getattr(of, name)))
    make_types_once()
    leave_out_what_is_not_asked()


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
    """tl.reduce with a function of our own: as on a GPU, neighbors are combined until one is left.

    Triton's interpreter calls the function for each element.
    """

    def halved(self, data):
        size = data[0].handle.data.shape[self.axis]
        neighbors = [
            self.to_tensor(x.handle.data.take(range(first, size, 2), self.axis), x.dtype)
            for first in (0, 1)
            for x in data
        ]
        combined = self.combine_fn.fn(*neighbors)
        return combined if isinstance(combined, tuple) else (combined,)

    def reduced(self, data):
        while self.axis is not None and data[0].handle.data.shape[self.axis] > 1:
            data = halved(self, data)
        return reduce(self, data)  # of one element along the axis

    return reduced


def unwrap_by_type(unwrap):
    """Nearly all that is unwrapped is a constexpr, a number, a type or a tensor."""
    as_they_are = (int, float, bool, str, core.dtype, core.block_type, core.pointer_type, tl.tensor)

    def unwrapped(value):
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in as_they_are else unwrap(value)

    return unwrapped


def leave_equal_shapes(broadcast):
    """Operands of one shape, which most are, need no broadcast."""

    def broadcasted(self, left, right):
        a, b = left.type, right.type
        if a.is_block() and b.is_block() and list(a.shape) == list(b.shape):
            return left, right
        return broadcast(self, left, right)

    return broadcasted


def leave_equal_types(check):
    """Numbers of one type, but where division would widen them, need no cast."""

    def checked(self, left, right, *args, **options):
        widened = len(args) == 4 or options.get("div_or_mod")
        tensors = type(left) is tl.tensor and type(right) is tl.tensor
        if tensors and not widened and left.dtype is right.dtype and not left.dtype.is_ptr():
            return self.broadcast_impl_value(left, right)
        return check(self, left, right, *args, **options)

    return checked


def make_types_once() -> None:
    """Shapes are tuples of Triton's own, made with a type each, for every tensor anew: share them.

    They are never changed. Only where types and tensors come out as Triton makes them.
    """
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    shapes: dict[tuple[int, ...], tuple] = {}
    scalar = (core.constexpr(1), core.tuple([]))

    def block_type(self, element_ty, shape):
        key = builtins.tuple([int(core._unwrap_if_constexpr(size)) for size in shape])
        if key not in shapes:
            make_type(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(size) for size in key])
            start = self.name.removesuffix(f"{element_ty}>")
            shapes[key] = (self.shape, self.numel, start, (core.constexpr(math.prod(key)), sizes))
        self.element_ty = element_ty
        self.shape, self.numel, start, self.of_tensors = shapes[key]
        self.name = f"{start}{element_ty}>"

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else scalar

    def seen(shape) -> list[str]:
        """Of two equal types and of their tensors: all that can be read."""
        types = [core.block_type(core.float32, shape) for _ in range(2)]
        made = [*types, *(core.tensor(None, of) for of in (*types, core.int64))]
        return [
            f"{name} {type(value)} {value}"
            for each in made
            for name, value in sorted(vars(each).items())
            if name != "of_tensors"
        ]

    examples = ([4], [core.constexpr(2), 8])
    before = [seen(shape) for shape in examples]
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    if [seen(shape) for shape in examples] != before:
        core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor


def leave_out_what_is_not_asked() -> None:
    """Without debug, Triton looks for overflows of integers, and then drops what it found."""
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        interpreter.interpreter_builder.options = dataclasses.replace(
            options, sanitize_overflow=False
        )
