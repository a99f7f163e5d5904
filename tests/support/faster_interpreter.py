"""Make Triton's interpreter, which runs the kernels in tests, several times as fast.

Results are unchanged. With a Triton that lacks one of these functions, or whose tensors have other
fields, the original is kept, and tests take longer.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import math

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

tl = interpreter.tl


def make_faster() -> None:
    """Replace functions of the interpreter by faster ones."""
    for owner, name, replacement in (
        (interpreter, "_patch_lang", patch_once_per_launch),
        (interpreter, "_patch_attr", call_directly),
        (interpreter, "_get_np_dtype", cache_dtypes),
        (interpreter.TensorHandle, "__post_init__", skip_validation),
        (interpreter.ReduceOps, "generic_reduce", reduce_by_halves),
        (core, "_unwrap_if_constexpr", unwrap_by_type),
        (TritonSemantic, "broadcast_impl_value", skip_equal_shapes),
        (TritonSemantic, "binary_op_type_checking_impl", skip_equal_types),
    ):
        if hasattr(owner, name):
            setattr(owner, name, replacement(getattr(owner, name)))
    share_types()
    skip_overflow_checks()


def patch_once_per_launch(patch):
    """Replace the functions of triton.language once per launch.

    Triton does so at every call of a device function, `tl.max` included, and each time searches all
    names of the language.
    """

    def patch_unless_done(fn):
        # Our device functions see tl, which the end of a launch restores; those of Triton tl.core.
        if tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load):
            return patch(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    return patch_unless_done


def call_directly(patch):
    """Call the function that Triton's wrappers of a builtin call in the end."""

    def patch_attr(obj, name, member, builder, scope):
        function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    return patch_attr if hasattr(interpreter, "interpreter_semantic") else patch


def cache_dtypes(np_dtype):
    """Triton makes a table of all dtypes at every look-up."""
    dtypes: dict[str, np.dtype] = {}

    def look_up(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = np_dtype(dtype)
        return dtypes[name]

    return look_up


def skip_validation(post_init):
    """Triton compares the sizes of NumPy's and Triton's dtypes for every result."""
    return lambda self: None


def reduce_by_halves(reduce):
    """Combine neighbors until one is left, as a GPU does, for tl.reduce with any function.

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
    """Nearly all values to unwrap are a constexpr, a number, a type or a tensor."""
    plain = (int, float, bool, str, core.dtype, core.block_type, core.pointer_type, tl.tensor)

    def unwrapped(value):
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    return unwrapped


def skip_equal_shapes(broadcast):
    """Most operands have equal shapes and need no broadcast."""

    def broadcasted(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and list(a.shape) == list(b.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcasted


def skip_equal_types(check):
    """Tensors of one type need no cast, except in divisions; a number is converted once.

    The tensor that Triton makes of a number is reused for tensors of the same type and shape.
    """
    constants: dict[tuple[object, ...], tl.tensor] = {}

    def with_number(self, lhs, rhs, args, options):
        lhs_is_tensor = type(lhs) is tl.tensor
        tensor, number = (lhs, rhs) if lhs_is_tensor else (rhs, lhs)
        key = (number, type(number), lhs_is_tensor, tensor.type.name, args, *options.items())
        if key in constants:
            return (tensor, constants[key]) if lhs_is_tensor else (constants[key], tensor)
        operands = check(self, lhs, rhs, *args, **options)
        kept, constant = operands if lhs_is_tensor else operands[::-1]
        if kept is tensor and number and len(constants) < 4096:  # 0.0 and -0.0 are one key
            constant.handle.data.flags.writeable = False
            constants[key] = constant
        return operands

    def checked(self, lhs, rhs, *args, **options):
        tensors = (type(lhs) is tl.tensor) + (type(rhs) is tl.tensor)
        widened = len(args) == 4 or options.get("div_or_mod")
        if tensors == 2 and not widened and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
            return self.broadcast_impl_value(lhs, rhs)
        if tensors == 1 and (type(lhs) in (int, float) or type(rhs) in (int, float)):
            return with_number(self, lhs, rhs, args, options)
        return check(self, lhs, rhs, *args, **options)

    return checked


def share_types() -> None:
    """Share the tuples of shapes, which Triton makes for every tensor, with a type for each.

    They are never changed. Done only if types and tensors are equal to those that Triton makes.
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

    def description(shape) -> list[str]:
        """Return all fields of two equal types and of their tensors."""
        types = [core.block_type(core.float32, shape) for _ in range(2)]
        made = [*types, *(core.tensor(None, each) for each in (*types, core.int64))]
        return [
            f"{name} {type(value)} {value}"
            for each in made
            for name, value in sorted(vars(each).items())
            if name != "of_tensors"
        ]

    examples = ([4], [core.constexpr(2), 8])
    before = [description(shape) for shape in examples]
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    if [description(shape) for shape in examples] != before:
        core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor


def skip_overflow_checks() -> None:
    """Without debug, Triton computes integer overflows and ignores the result."""
    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        interpreter.interpreter_builder.options = dataclasses.replace(
            options, sanitize_overflow=False
        )
