"""Where a user's hub listens and stores by default."""

import contextlib
import os
import stat
from pathlib import Path

from blendhub.core.errors import HubError


def default_endpoint() -> str:
    """The endpoint that hubs and tools use by default, in a directory that only this user can enter."""
    folder = runtime_directory()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise HubError(f"cannot make the directory {folder}: {error.strerror}; name a socket with --endpoint") from None
    if not is_private(found):
        raise HubError(
            f"{folder} should be a directory that only uid {os.getuid()} can enter, but it is {_owner(found)}; "
            "remove it or change it, or name a socket with --endpoint"
        )
    return f"ipc://{folder}/hub.sock"


def runtime_directory() -> Path:
    """The directory of the default endpoint, which may not exist yet."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime, "blendhub") if os.path.isabs(runtime) else Path(f"/tmp/blendhub-{os.getuid()}")


def is_private(found: os.stat_result) -> bool:
    """Whether it is a directory that only this user can enter: one who can write there could replace the socket."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def default_disk_store() -> Path:
    """The directory of the store ``disk``, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "blendhub" / "disk"


def _owner(found: os.stat_result) -> str:
    kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no directory"
    return f"{kind} of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
