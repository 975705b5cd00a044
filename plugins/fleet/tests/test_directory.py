"""The shared directory: what stands in place of its files, who may read them, and a mount that hangs."""

import contextlib
import grp
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blendhub.core.errors import StoreAway, StoreFailed
from blendhub.testing.shared_stores.base import Join, chunk, content, key, run
from harness.servers.redis_server import RedisServer, needs_redis
from plugins.fleet.tests import mount

pytestmark = [needs_redis, pytest.mark.timeout(60)]

NOBODY = 65534
SILENCE_S = 0.5


@pytest.fixture
def join(join: Join, redis_server: RedisServer) -> Join:
    """Members at a Redis that other users reach."""
    socket = Path(redis_server.url.removeprefix("unix://"))
    os.chmod(socket.parent, 0o711)
    os.chmod(socket, 0o777)
    return join


def files(place: Path) -> list[Path]:
    return list(place.rglob("*.kv"))


@contextlib.contextmanager
def as_user(uid: int, gid: int) -> Iterator[None]:
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    before = os.getgroups()
    os.setgroups([gid])
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


def test_what_is_no_file_is_a_miss_at_once_and_dropped_for_all_and_a_folder_is_made_again(
    join: Join, place: Path
) -> None:
    writer, reader = join(), join()
    puts: list[Callable[[Path], object]] = [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)]
    writer.save_batch("a", dict(enumerate(range(1, 4))))
    for file, put in zip(files(place), puts, strict=True):
        file.unlink()
        put(file)
    assert [reader.load("a", index) for index in range(3)] == [None] * 3, "and nothing is waited for"
    writer.follow()
    assert writer.catalogue == {}
    shutil.rmtree(place)
    writer.save("b", 0, 2)
    assert writer.load("b", 0) == [content(2)]


def test_nobody_reads_what_a_hub_stores_but_hubs_of_its_group(join: Join, place: Path) -> None:
    folder = place / place.parent.name
    folder.mkdir(parents=True)
    os.chmod(folder, 0o755)  # made by hand
    before = os.umask(0)
    try:
        one = join()
        one.save("a", 0, 1)
    finally:
        os.umask(before)
    (file,) = files(place)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent, folder)] == [0o600, 0o700, 0o700]
    with as_user(NOBODY, NOBODY), pytest.raises(StoreFailed, match="unix_group"):
        join().load("a", 0)
    assert one.load("a", 0) == [content(1)], "what another user cannot read is not dropped"
    shutil.rmtree(place)
    group = grp.getgrnam("games")
    one = join(unix_group=group.gr_name)
    one.save("b", 0, 1)
    with as_user(NOBODY, group.gr_gid):
        other = join(unix_group=str(group.gr_gid))
        assert other.load("b", 0) == [content(1)]
        other.save("c", 0, 2)
    one.follow()
    assert one.load("c", 0) == [content(2)]
    facts = [(file.stat(), file.parent.stat()) for file in files(place)]
    assert {stat.S_IMODE(of_file.st_mode) for of_file, _ in facts} == {0o640}
    assert {of_file.st_uid for of_file, _ in facts} == {0, NOBODY}
    assert {stat.S_IMODE(of_folder.st_mode) for _, of_folder in facts} == {0o2770}


def test_a_write_that_fails_leaves_nothing(join: Join, place: Path) -> None:
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mounting, check=False).returncode:
        pytest.skip("needs root, to mount a small file system")
    try:
        one = join()
        one.save("a", 0, 1)
        (kept,) = files(place)
        with pytest.raises(StoreFailed, match="No space left"):
            one.save_batch("b", {index: index for index in range(8)})
        assert files(place) == [kept] and not list(place.rglob("*.draft"))
        assert not vars(one.store)["_unpublished"], "tokens of chunks that may never come again"
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.fixture
def mounted(place: Path) -> Iterator[mount.Mount]:
    """Its server shows another owner of the files, as NFS with root_squash does."""
    try:
        with mount.Mount(place.with_name("behind"), place, "--force-user=nobody") as mounted:
            yield mounted
    except OSError as error:
        pytest.skip(f"{mount.MISSING}: {error}")


@pytest.mark.skipif(mount.BINARY is None, reason=mount.MISSING)
def test_calls_of_a_mount_that_hangs_end_and_write_nothing_later(join: Join, mounted: mount.Mount) -> None:
    one = join(transfer_deadline_s=SILENCE_S)
    one.save("a", 0, 1)
    assert [file.stat().st_uid for file in files(mounted.place)] == [NOBODY]
    assert one.load("a", 0) == join().load("a", 0) == [content(1)]
    one.store.save_run(run("b"))
    slot = one.slot(3)
    mounted.hang()
    began = time.monotonic()
    with pytest.raises(StoreAway, match=r"did nothing for 0\.5 s; does its server run"):
        one.store.load(key("a"), chunk(0), [slot])
    assert SILENCE_S <= time.monotonic() - began < SILENCE_S + 1
    with pytest.raises(StoreAway):
        one.store.save(key("b"), chunk(0), [one.slot(0)])
    for _ in range(4):
        with pytest.raises(StoreAway):
            one.store.load(key("a"), chunk(0), [one.slot(4)])
    began = time.monotonic()
    with pytest.raises(StoreAway, match=r"4 calls of .* are under way or hang"):
        one.store.load(key("a"), chunk(0), [one.slot(4)])
    assert time.monotonic() - began < SILENCE_S / 2
    assert one.store.figures()["directory_hung_calls"] == 4
    slot[:] = content(7)
    mounted.go_on()
    for thread in threading.enumerate():
        if thread.name == "blendhub-files":
            thread.join(20)
    assert bytes(slot) == content(7), "a call that was left wrote into what is another chunk's now"
    assert one.load("a", 0) == [content(1)]
    assert len(files(mounted.place)) == 1, "what was not published is removed"
