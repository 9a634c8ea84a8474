"""How much main memory and how many cores an engine on a CPU may take.

Linux limits both by control groups, of version 2 or 1. What limits a group limits those inside it,
too, so that the groups above this process's own are read as well, as far as they are shown here: a
container sees its own at the top.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of each version: a group's limit, what it has taken, and how names in memory.stat begin."""


def find_free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take without swapping, as Linux sees it.

    What holds cached files counts as free: the kernel gives it away. ``root`` is where /proc and
    /sys are.
    """
    free = [_read_machine(root / "proc/meminfo")]
    for group in _find_groups("memory", root):
        free += _read_free(group)
    return max(0, min(free))


def find_core_limit(root: Path = Path("/")) -> int | None:
    """Return how many cores the control groups let this process use; None if they do not say.

    A part of a core counts as one. Of which cores it may use torch knows itself.
    """
    limits = [
        math.ceil(cores) for group in _find_groups("cpu", root) for cores in _read_cores(group)
    ]
    return min(limits, default=None)


def _read_machine(table: Path) -> int:
    if not table.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":") for line in table.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _find_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups and of those above, whether they exist or not."""
    table = root / "proc/self/cgroup"
    for line in table.read_text().splitlines() if table.exists() else ():
        _, controllers, path = line.split(":", 2)  # of version 2 there is one line, without names
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = top / path.lstrip("/")
            yield from (group, *group.parents[: len(group.parts) - len(top.parts)])


def _read_free(group: Path) -> Iterator[int]:
    """Yield the bytes that a group has left, cached files included, if it has a limit."""
    for limit, taken, prefix in MEMORY_FILES:
        if not (group / limit).exists() or (text := (group / limit).read_text().strip()) == "max":
            continue
        lines = (group / "memory.stat").read_text().splitlines()
        parts = {name: int(value) for name, value in map(str.split, lines)}
        cached = parts[f"{prefix}active_file"] + parts[f"{prefix}inactive_file"]
        yield int(text) - int((group / taken).read_text()) + cached


def _read_cores(group: Path) -> Iterator[float]:
    """Yield how many cores' time a group may use, if it has a limit."""
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    elif (group / "cpu.cfs_quota_us").exists():
        quota_us = int((group / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:  # -1: no limit
            yield quota_us / int((group / "cpu.cfs_period_us").read_text())
