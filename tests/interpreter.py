"""Mends Triton's interpreter.

It cuts to 8-bit floats and loses a carry: devices round. And it prepares the language anew at every
call of a function inside a kernel, which is what most of a test's time would go to.
"""

import inspect

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


def prepare_once_a_launch():
    """Let functions that a kernel calls find the language as the kernel did."""
    interpreter._patch_lang = LanguageOfOneLaunch().prepare


class LanguageOfOneLaunch:
    """Remembers what is prepared while a kernel runs."""

    def __init__(self):
        self._prepared = None  # modules; None between launches

    def prepare(self, function):
        modules = {id(value) for value in function.__globals__.values() if inspect.ismodule(value)}
        modules &= {id(tl), id(tl.core)}
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
