"""How many files, and so how many connections, this process may have open."""

import resource

RESERVED_FILES = 256
"""What a server has open besides connections: the model's files, the core, logs."""
ENOUGH_FILES = 2**20


def raise_file_limit() -> None:
    """Let this process and its children open as many files as they are allowed to ask for.

    The usual limit of 1024 is there for programs that cannot count further.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def choose_max_connections(wanted: int | None) -> int:
    """Return how many connections a server keeps open: what is wanted, else what files are left."""
    if wanted is not None:
        return wanted
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ENOUGH_FILES
    return max(soft - RESERVED_FILES, soft // 2)
