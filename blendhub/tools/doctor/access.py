"""Who may use a file or a directory."""

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from blendhub.tools.doctor.finding import Finding, fail, warn


def as_root(command: str) -> str:
    """The command with ``sudo`` unless the user is root."""
    return command if os.geteuid() == 0 else f"sudo sh -c {shlex.quote(command)}"


def quoted(path: Path | str) -> str:
    """A path quoted for use in a command."""
    return shlex.quote(str(path))


def trouble_with_directory(path: Path, *, what: str) -> Iterator[Finding]:
    """Findings if this user cannot keep ``what`` in a directory, which may not exist yet, or others can reach it."""
    existing = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not existing.is_dir():
        yield fail(f"{existing} is not a directory, so {what} cannot be kept there", f"rm {quoted(existing)}")
    elif existing != path:
        if not _is_usable(existing):
            yield fail(
                f"{path} does not exist, and this user cannot make it in {existing}",
                as_root(f"install -d -m 700 -o {os.getuid()} {quoted(path)}"),
            )
    elif not _is_usable(path):
        command = f"chmod u+rwx {quoted(path)}" if _is_mine(path) else as_root(f"chown -R {os.getuid()} {quoted(path)}")
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            command = as_root(f"mount -o remount,rw {quoted(_mount_of(path))}")
        yield fail(f"this user cannot keep {what} in {path}: {_facts(path)}", command)
    elif _others_can_replace(path):
        yield fail(f"others can replace {what} in {path}: {_facts(path)}", f"chmod go-w {quoted(path)}")


def trouble_with_secret(path: Path, what: str) -> Iterator[Finding]:
    """A finding if others can read or write a file or a directory that only its owner should."""
    found = path.lstat()
    if found.st_uid != os.getuid():
        yield fail(f"{what} {path} belongs to uid {found.st_uid}", as_root(f"chown -R {os.getuid()} {quoted(path)}"))
    elif found.st_mode & 0o022:
        yield fail(f"others can write to {what} {path}: {_facts(path)}", f"chmod go-rwx {quoted(path)}")
    elif found.st_mode & 0o055:
        yield warn(f"others can read {what} {path}: {_facts(path)}", f"chmod go-rwx {quoted(path)}")


def _is_usable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK | os.X_OK)


def _is_mine(path: Path) -> bool:
    return path.stat().st_uid == os.getuid()


def _others_can_replace(path: Path) -> bool:
    """Whether others than this user and root can rename files there: the sticky bit forbids it."""
    mode = path.stat().st_mode
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def _facts(path: Path) -> str:
    found = path.stat()
    read_only = ", mounted read-only" if os.statvfs(path).f_flag & os.ST_RDONLY else ""
    return f"it is of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}{read_only}"


def _mount_of(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if os.path.ismount(one))
