"""The default size of the arena: with trees of files like those of machines, and beside hubs that reserve."""

import asyncio

import pytest

from blendhub.hub.memory import arena, segments
from blendhub.hub.memory import default_size as memory
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.default_size import available_bytes

GIB = 2**30
MOUNT_V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
MOUNT_V2 = "41 31 0:38 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHERS = "31 23 0:28 / / rw - ext4 /dev/sda rw\n33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
NO_LIMIT_V1 = 9223372036854771712


def v2(path: str, groups: dict[str, dict[str, object]], root: str = "/") -> dict[str, object]:
    """A process in the group ``path``; limits and numbers by group, as seen under the mount."""
    files = {
        f"sys/fs/cgroup{group}/{name}": text for group, numbers in groups.items() for name, text in numbers.items()
    }
    return {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": OTHERS + MOUNT_V2.format(root=root), **files}


def v1(path: str, groups: dict[str, dict[str, object]]) -> dict[str, object]:
    place = "sys/fs/cgroup/memory"
    files = {f"{place}{group}/{name}": text for group, numbers in groups.items() for name, text in numbers.items()}
    membership = f"9:name=systemd:/\n4:memory:{path}\n3:cpu,cpuacct:/x\n0::/\n"
    return {"proc/self/cgroup": membership, "proc/self/mountinfo": OTHERS + MOUNT_V1, **files}


def numbers_v2(limit: object, used: int, cache: int = 0, high: object = "max") -> dict[str, object]:
    stat = f"anon {used - cache}\nactive_file 1\ninactive_file {cache}"
    return {"memory.max": limit, "memory.high": high, "memory.current": used, "memory.stat": stat}


def numbers_v1(limit: int, used: int) -> dict[str, object]:
    stat = "inactive_file 1\ntotal_inactive_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


TREES = {
    "no control groups": ({}, 64),
    "v2, its own limit": (v2("/a/b", {"/a/b": numbers_v2(8 * GIB, 3 * GIB)}), 5),
    "v2, an ancestor's limit": (v2("/a/b", {"/a": numbers_v2(8 * GIB, 6 * GIB), "/a/b": numbers_v2("max", GIB)}), 2),
    "v2, memory.high": (v2("/a", {"/a": numbers_v2(9 * GIB, GIB, high=4 * GIB)}), 3),
    "v2, pages of files can go": (v2("/a", {"/a": numbers_v2(8 * GIB, 7 * GIB, cache=4 * GIB)}), 5),
    "v2, in a container that sees itself as the root": (v2("/", {"": numbers_v2(4 * GIB, GIB)}), 3),
    "v2, a mount that begins at the container": (v2("/docker/1f", {"": numbers_v2(4 * GIB, GIB)}, "/docker/1f"), 3),
    "v2, more is used than allowed": (v2("/a", {"/a": numbers_v2(2 * GIB, 3 * GIB)}), 0),
    "v2, numbers that cannot be read": (v2("/a", {"/a": {"memory.max": "nonsense", "memory.current": ""}}), 64),
    "v1, an ancestor's limit": (v1("/a/b", {"": numbers_v1(6 * GIB, 2 * GIB), "/a/b": numbers_v1(NO_LIMIT_V1, 1)}), 4),
    "v1, another's limit": (v1("/a", {"/b": numbers_v1(1, 0), "/a": numbers_v1(NO_LIMIT_V1, 0)}), 64),
}


@pytest.mark.parametrize("files, gib", TREES.values(), ids=TREES)
def test_what_control_groups_leave_is_what_is_available(tmp_path, files, gib):
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * 2**20} kB\n", **files}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert available_bytes(tmp_path) == gib * GIB


@pytest.mark.parametrize(
    "available, shared, taken, engines, expected",
    [
        (40, 100, 0, 1, 10),
        (40, 10, 0, 1, 5),
        (2000, 2000, 0, 1, 64),
        (2000, 2000, 0, 8, 8),
        (40, 100, 20, 1, 5),
        (40, 100, 80, 1, 0),
    ],
    ids=["a quarter", "half of /dev/shm", "the most", "eight engines", "beside a hub that reserves", "none left"],
)
def test_the_arena_is_the_least_of_three_shares(monkeypatch, available, shared, taken, engines, expected):
    monkeypatch.setattr(memory, "available_bytes", lambda: available * GIB)
    monkeypatch.setattr(memory, "free_shared_bytes", lambda: shared * GIB)
    monkeypatch.setattr(memory, "unreserved_bytes", lambda: taken * GIB)
    assert memory.default_arena_bytes(engines) == expected * GIB


@pytest.mark.alone
def test_what_other_hubs_still_reserve_is_known(monkeypatch):
    monkeypatch.setattr(arena, "STEP", 2**16)
    before = segments.unreserved_bytes()
    one, other = Arena(2**20), Arena(2**22)
    assert segments.unreserved_bytes() - before == one.progress.left + other.progress.left > 2**22
    asyncio.run(other.reserve())
    assert segments.unreserved_bytes() - before == one.progress.left
    one.close()
    other.close()
    assert segments.unreserved_bytes() == before
