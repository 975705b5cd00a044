"""The default size of the arena: by the memory of the machine, its control groups and /dev/shm."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blendhub.hub.memory.segments import free_shared_bytes, unreserved_bytes

OF_AVAILABLE = 0.25
OF_SHARED = 0.5
MAX_BYTES = 64 * 2**30
"""A larger arena takes minutes to reserve and to pin, so the hub makes one only if the configuration asks for it."""


def default_arena_bytes(engines: int = 1) -> int:
    """The least of a quarter of the free memory, half of the free shared memory, and ``MAX_BYTES``.

    ``engines``: how many start together on this machine, each with a hub; the size is divided by their number. Memory
    that other hubs are going to reserve does not count as free.
    """
    taken = unreserved_bytes()
    shares = OF_AVAILABLE * (available_bytes() - taken), OF_SHARED * (free_shared_bytes() - taken)
    return max(0, int(min(*shares, MAX_BYTES) / engines))


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can have now: the machine's, or less if a control group above it allows less.

    ``root`` is where ``/proc`` and the control groups are looked for.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    left = [left for group, files in _groups(root) if (left := _bytes_left(group, files)) is not None]
    return min([1024 * kib, *left])


class _Files(NamedTuple):
    """The names of the files of one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    cache: str
    """The line of ``memory.stat`` that counts reclaimable file pages; the usage includes them."""


_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The control groups of this process that may limit its memory, from its own up to the outermost that it sees."""
    mine = _own_groups(root)
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, *_, options) = before.split(), after.split() or ["", ""]
        if kind == "cgroup2":
            files, within = _V2, mine.get("")
        elif kind == "cgroup" and "memory" in options.split(","):
            files, within = _V1, mine.get("memory")
        else:
            continue
        mounted, top = fields[3], root / fields[4].lstrip("/")
        # In a container the mount may begin at the container's group, while paths are given from the machine's root.
        inside = Path(os.path.relpath(within or "/", mounted))
        path = top if ".." in inside.parts else top / inside
        yield from ((group, files) for group in (path, *path.parents) if group == top or top in group.parents)


def _own_groups(root: Path) -> dict[str, str]:
    """The path of this process's group by controller; that of version 2 has no controller's name."""
    groups: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _bytes_left(group: Path, files: _Files) -> int | None:
    """What a control group may still use; None if it has no limit."""
    limits = [limit for name in files.limits if (limit := _number(group / name)) is not None]
    usage = _number(group / files.usage)
    if not limits or usage is None:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    return max(0, min(limits) - max(0, usage - int(stat.get(files.cache, 0))))


def _number(file: Path) -> int | None:
    """None if there is no such file, or no limit in it."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
