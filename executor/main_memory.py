"""How much main memory a CPU's engine may take."""

import os
from pathlib import Path


def find_free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take without swapping, as Linux sees it.

    What holds cached files counts as free: the kernel gives it away. ``root`` is where /proc and
    /sys are.
    """
    free = [_read_machine(root / "proc/meminfo")]
    group = root / "sys/fs/cgroup"
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free.append(int(text) - _read_taken(group))
    return max(0, min(free))


def _read_machine(table: Path) -> int:
    if not table.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":") for line in table.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _read_taken(group: Path) -> int:
    """Return the bytes of a control group that are not cached files."""
    lines = (group / "memory.stat").read_text().splitlines()
    parts = {name: int(value) for name, value in map(str.split, lines)}
    cached = parts["active_file"] + parts["inactive_file"]
    return int((group / "memory.current").read_text()) - cached
