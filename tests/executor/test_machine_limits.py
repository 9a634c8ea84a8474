"""Free memory and cores are those of the machine or of a control group, whichever are fewer."""

import pytest

from octavo.executor.machine_limits import find_core_limit, find_free_memory

MIB = 2**20
UNLIMITED = {1: 2**63 - 4096, 2: "max"}


def make_root(folder, *, version=2, path="/", available=50 * MIB):
    """Write what Linux shows in /proc; returns the folder, and where the groups are."""
    (folder / "proc/self").mkdir(parents=True)
    table = f"MemTotal:       9999 kB\nMemAvailable:   {available // 1024} kB\n"
    (folder / "proc/meminfo").write_text(table)
    lines = {
        1: f"5:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:/\n0::/init\n",
        2: f"0::{path}\n",
    }
    (folder / "proc/self/cgroup").write_text(lines[version])
    return folder


def write_files(group, **files):
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(f"{text}\n")


def limit_memory(root, *, version, path="", limit, current=0, files=(0, 0)):
    """Give a group a limit, and say how much of what it has taken are files."""
    active, inactive = files
    if version == 2:
        group = root / "sys/fs/cgroup" / path
        stat = f"anon 7\nactive_file {active}\ninactive_file {inactive}"
        write_files(group, memory__max=limit, memory__current=current, memory__stat=stat)
        return
    group = root / "sys/fs/cgroup/memory" / path
    stat = f"active_file 1\ninactive_file 1\ntotal_active_file {active}\n"
    write_files(
        group,
        memory__limit_in_bytes=limit,
        memory__usage_in_bytes=current,
        memory__stat=f"{stat}total_inactive_file {inactive}",
    )


def limit_cores(root, *, version, path="", quota):
    """Give a group a quota of a tenth of a second, in microseconds; None is no limit."""
    if version == 2:
        value = f"{'max' if quota is None else quota} 100000"
        write_files(root / "sys/fs/cgroup" / path, cpu__max=value)
        return
    group = root / "sys/fs/cgroup/cpu" / path
    quota = -1 if quota is None else quota
    write_files(group, cpu__cfs_quota_us=quota, cpu__cfs_period_us=100_000)


@pytest.fixture(params=[1, 2])
def version(request):
    return request.param


def test_this_machine_has_some():
    assert find_free_memory() > MIB
    assert find_core_limit() != 0


@pytest.mark.parametrize("limit", [None, 100 * MIB])
def test_machine_with_less_than_its_group_decides(limit, version, tmp_path):
    root = make_root(tmp_path, version=version, available=5 * MIB)
    limit_memory(root, version=version, limit=limit or UNLIMITED[version])
    assert find_free_memory(root) == 5 * MIB


def test_cached_files_of_a_group_count_as_free(version, tmp_path):
    root = make_root(tmp_path, version=version)
    taken = {"limit": 10 * MIB, "current": 9 * MIB, "files": (2 * MIB, 4 * MIB)}
    limit_memory(root, version=version, **taken)
    assert find_free_memory(root) == 7 * MIB


def test_group_beyond_its_limit_has_nothing(version, tmp_path):
    root = make_root(tmp_path, version=version)
    limit_memory(root, version=version, limit=10 * MIB, current=11 * MIB)
    assert find_free_memory(root) == 0


@pytest.mark.parametrize("limited", ["", "a", "a/b"])
def test_any_group_above_may_be_the_limit(limited, version, tmp_path):
    root = make_root(tmp_path, version=version, path="/a/b")
    for path in ("", "a", "a/b"):
        limit = 3 * MIB if path == limited else UNLIMITED[version]
        limit_memory(root, version=version, path=path, limit=limit)
        quota = 300_000 if path == limited else None
        limit_cores(root, version=version, path=path, quota=quota)
    assert find_free_memory(root) == 3 * MIB
    assert find_core_limit(root) == 3


def test_container_that_does_not_see_its_groups_name_has_the_limit_at_the_top(version, tmp_path):
    root = make_root(tmp_path, version=version, path="/docker/0123")
    limit_memory(root, version=version, limit=3 * MIB)
    limit_cores(root, version=version, quota=200_000)
    assert (find_free_memory(root), find_core_limit(root)) == (3 * MIB, 2)


@pytest.mark.parametrize(
    ("quota", "cores"), [(None, None), (50_000, 1), (100_000, 1), (150_000, 2), (6_400_000, 64)]
)
def test_part_of_a_core_is_one(quota, cores, version, tmp_path):
    root = make_root(tmp_path, version=version)
    limit_cores(root, version=version, quota=quota)
    assert find_core_limit(root) == cores


def test_groups_of_other_processes_say_nothing(version, tmp_path):
    root = make_root(tmp_path, version=version, path="/a")
    limit_memory(root, version=version, path="b", limit=MIB)
    limit_cores(root, version=version, path="b", quota=100_000)
    assert (find_free_memory(root), find_core_limit(root)) == (50 * MIB, None)


def test_other_systems_have_their_physical_memory_and_all_cores(tmp_path):
    assert find_free_memory(tmp_path) > MIB
    assert find_core_limit(tmp_path) is None
