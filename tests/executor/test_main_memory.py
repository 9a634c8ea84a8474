"""Free memory is that of the machine or of the control group, whichever is less."""

import pytest

from octavo.executor.main_memory import find_free_memory

MIB = 2**20


def make_root(folder, *, available, limit=None, current=0, files=(0, 0)):
    """Write what Linux shows in /proc and /sys."""
    (folder / "proc").mkdir()
    table = f"MemTotal:       9999 kB\nMemAvailable:   {available // 1024} kB\n"
    (folder / "proc/meminfo").write_text(table)
    if limit is not None:
        group = folder / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{current}\n")
        stat = f"anon 7\nactive_file {files[0]}\ninactive_file {files[1]}\n"
        (group / "memory.stat").write_text(stat)
    return folder


def test_this_machine_has_some():
    assert find_free_memory() > MIB


@pytest.mark.parametrize("limit", [None, "max", 100 * MIB])
def test_machine_with_less_than_its_group_decides(limit, tmp_path):
    assert find_free_memory(make_root(tmp_path, available=5 * MIB, limit=limit)) == 5 * MIB


def test_cached_files_of_a_group_count_as_free(tmp_path):
    group = {"limit": 10 * MIB, "current": 9 * MIB, "files": (2 * MIB, 4 * MIB)}
    assert find_free_memory(make_root(tmp_path, available=50 * MIB, **group)) == 7 * MIB


def test_group_beyond_its_limit_has_nothing(tmp_path):
    group = {"limit": 10 * MIB, "current": 11 * MIB}
    assert find_free_memory(make_root(tmp_path, available=50 * MIB, **group)) == 0


def test_other_systems_have_their_physical_memory(tmp_path):
    assert find_free_memory(tmp_path) > MIB
