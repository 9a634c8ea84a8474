"""Mends Triton's interpreter.

It cuts to 8-bit floats and loses a carry: devices round. And most of a test's time would go to what
it does again and again: it prepares the language at every call of a function inside a kernel, and
takes shapes and types apart for every tensor.
"""

import dataclasses
import inspect
import math

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

convert = interpreter._convert_float
prepare = interpreter._patch_lang


def convert_as_a_device(values, source, target, rounding):
    """Round to nearest and saturate, as ``cvt.rn.satfinite`` does."""
    if target != tl.float8e4nv:
        return convert(values, source, target, rounding)
    if source == tl.bfloat16:  # kept as its bits
        floats = torch.from_numpy(np.ascontiguousarray(values)).view(torch.bfloat16).float()
    else:
        floats = torch.from_numpy(np.ascontiguousarray(values)).float()
    return floats.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


find_type = interpreter._get_np_dtype
numpy_types = {}


def find_numpy_type(dtype):
    """Return how numpy keeps elements of a type."""
    dtype = dtype.scalar
    if dtype.name not in numpy_types:
        numpy_types[dtype.name] = find_type(dtype)
    return numpy_types[dtype.name]


create_type = tl.block_type.__init__
block_types = {}


def create_block_type(self, element_ty, shape):
    """Share what is the same in all types of one shape and one kind of element."""
    key = element_ty.name, tuple(tl.core._unwrap_if_constexpr(length) for length in shape)
    if key not in block_types:
        create_type(self, element_ty, shape)
        block_types[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = block_types[key]


shapes = {}


def create_tensor(self, handle, dtype):
    """Share the shape."""
    self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
    key = tuple(dtype.shape.values) if dtype.is_block() else ()
    if key not in shapes:
        numel = tl.constexpr(math.prod(key))
        shapes[key] = tl.tuple([tl.constexpr(length) for length in key]), numel
    self.shape, self.numel = shapes[key]


def do_once():
    """Do once what is the same each time."""
    interpreter._patch_lang = LanguageOfOneLaunch().prepare
    interpreter._get_np_dtype = find_numpy_type
    tl.block_type.__init__ = create_block_type
    tl.tensor.__init__ = create_tensor
    builder = interpreter.interpreter_builder
    # Overflows are computed and, without ``debug``, never asserted.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class LanguageOfOneLaunch:
    """Remembers what is prepared while a kernel runs."""

    def __init__(self):
        self._prepared = None  # modules; None between launches
        self._modules = {}  # of the language, by the file that imports them

    def prepare(self, function):
        names = function.__globals__
        modules = self._modules.get(names["__name__"])
        if modules is None:
            modules = {id(value) for value in names.values() if inspect.ismodule(value)}
            modules &= {id(tl), id(tl.core)}
            self._modules[names["__name__"]] = modules
        if self._prepared is None:
            self._prepared = modules
            return _Scope(self, prepare(function))
        if not modules <= self._prepared:
            self._prepared |= modules
            prepare(function)
        return None

    def end(self):
        self._prepared = None


class _Scope:
    def __init__(self, launch, scope):
        self._launch, self._scope = launch, scope

    def restore(self):
        self._launch.end()
        self._scope.restore()
