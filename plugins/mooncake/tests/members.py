"""The processes that call Mooncake for others."""

import contextlib
from pathlib import Path


def child_of(owner: int) -> int:
    """The process that calls Mooncake for another one."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == owner and b"blendhub_mooncake.child" in (process / "cmdline").read_bytes():
                return int(process.name)
    raise ProcessLookupError(f"{owner} has no process of Mooncake now")
