"""Sizes of grids and blocks, for launches: Triton's own functions, which kernels call, are slow."""


def cdiv(dividend: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
