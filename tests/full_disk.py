"""A disk that takes no more, as far as one process can have one of its own."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let every write beyond so many bytes of a file fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
