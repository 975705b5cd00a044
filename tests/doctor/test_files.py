"""What is wrong with sockets, stores and the clock of files: each fault is made, and mended by the advice."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOCKETS, STORES, CLOCK, LEFTOVERS = (["--only", name] for name in ("sockets", "stores", "clock", "leftovers"))


def listening(path: Path, mode: int = 0o600) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    path.chmod(mode)
    made.listen()
    return made


def test_where_nothing_is_wrong_a_hub_can_listen(doctor):
    assert "a hub can listen at ipc://~/run/blendhub/hub.sock" in doctor(*SOCKETS).only("ok")["sentence"]


def test_a_directory_of_sockets_that_others_enter_is_closed(doctor):
    folder = doctor.runtime / "blendhub"
    folder.mkdir()
    folder.chmod(0o770)
    found = doctor.mends(*SOCKETS)
    assert found["verdict"] == "fail" and "others can enter ~/run/blendhub" in found["sentence"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_directory_is_removed(doctor):
    (doctor.runtime / "blendhub").symlink_to(doctor.cache)
    assert "it is not a directory of uid" in doctor.mends(*SOCKETS)["sentence"]
    assert doctor.cache.is_dir()


def test_a_runtime_directory_that_is_missing_is_named(doctor):
    found = doctor(*SOCKETS, XDG_RUNTIME_DIR=str(doctor.home / "missing")).only("fail")
    assert "cannot be made" in found["sentence"] and found["command"] == "unset XDG_RUNTIME_DIR"


@pytest.mark.parametrize("mode, verdict", [(0o666, "fail"), (0o644, "warn")])
def test_a_socket_that_others_reach_is_closed_to_them(doctor, mode, verdict):
    (doctor.runtime / "blendhub").mkdir(mode=0o700)
    with listening(doctor.runtime / "blendhub" / "hub.sock", mode):
        assert doctor.mends(*SOCKETS)["verdict"] == verdict


def test_a_file_in_place_of_a_socket_is_removed(doctor):
    (doctor.runtime / "blendhub").mkdir(mode=0o700)
    (doctor.runtime / "blendhub" / "hub.sock").touch(0o600)
    assert "is not a socket" in doctor.mends(*SOCKETS)["sentence"]


def test_a_configured_socket_needs_a_directory_that_others_cannot_write(doctor):
    shared = doctor.home / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    config = doctor.toml(f'[[listen]]\nendpoint = "ipc://{shared}/hub.sock"')
    assert "others can replace a hub's socket in ~/shared" in doctor.mends(*SOCKETS, "--config", config)["sentence"]
    # As in /tmp: only the owner of a file can rename it.
    shared.chmod(0o1777)
    assert doctor(*SOCKETS, "--config", config).only("ok")


def test_paths_that_are_too_long_for_a_socket_are_found(doctor):
    config = doctor.toml(f'[[listen]]\nendpoint = "ipc:///tmp/{"x" * 100}/hub.sock"')
    assert "has 114 bytes, more than 107" in doctor(*SOCKETS, "--config", config).only("fail")["sentence"]
    long = doctor.home / ("x" * 90)
    long.mkdir()
    found = doctor(*SOCKETS, TMPDIR=str(long)).only("fail")
    assert "the socket of an embedded hub" in found["sentence"] and found["command"] == "export TMPDIR=/tmp"


def test_a_secret_key_that_others_read_is_closed_to_them(doctor):
    key = doctor.home / "server.secret"
    key.touch(0o644)
    key.chmod(0o644)
    config = doctor.toml(f'[[listen]]\nendpoint = "tcp://127.0.0.1:0"\noptions = {{secret_key = "{key}"}}')
    found = doctor.mends(*SOCKETS, "--config", config)
    assert found["verdict"] == "warn" and "others can read the secret key ~/server.secret" in found["sentence"]


def store(doctor, path: Path) -> list[str]:
    return ["--config", doctor.toml(f'[store]\noptions = {{path = "{path}"}}')]


def test_without_a_store_nothing_is_wrong(doctor):
    assert "no store is configured" in doctor(*STORES).only("ok")["sentence"]


@pytest.mark.parametrize("mode, verdict", [(0o777, "fail"), (0o755, "warn")])
def test_a_store_that_others_reach_is_closed_to_them(doctor, mode, verdict):
    folder = doctor.cache / "blendhub" / "disk"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert doctor.mends(*STORES)["verdict"] == verdict


def test_a_file_in_place_of_a_store_is_removed(doctor):
    path = doctor.home / "store"
    path.touch()
    assert "is not a directory" in doctor.mends(*STORES, *store(doctor, path))["sentence"]


def test_a_store_on_a_read_only_disk_is_made_writable(doctor, elsewhere):
    path = doctor.home / "store"
    path.mkdir(mode=0o700)
    within = elsewhere('mount -t tmpfs -o size=2g,mode=700 tmpfs "$1"; mount -o remount,ro "$1"', str(path))
    found = doctor.mends(*STORES, *store(doctor, path), within=within)
    assert found["verdict"] == "fail" and "mounted read-only" in found["sentence"]


def test_a_store_that_cannot_be_made_is_found(doctor, elsewhere):
    parent = doctor.home / "parent"
    parent.mkdir()
    within = elsewhere('mount -t tmpfs -o ro tmpfs "$1"', str(parent))
    found = doctor(*STORES, *store(doctor, parent / "store"), within=within).only("fail")
    assert "this user cannot make it in ~/parent" in found["sentence"] and "install -d -m 700" in found["command"]


def test_a_store_on_a_disk_that_is_almost_full_is_found(doctor, elsewhere):
    path = doctor.home / "store"
    path.mkdir(mode=0o700)
    within = elsewhere('mount -t tmpfs -o size=4m,mode=700 tmpfs "$1"', str(path))
    found = doctor(*STORES, *store(doctor, path), within=within).only("warn")
    assert "has 4 MiB left" in found["sentence"]


def test_files_of_the_future_are_dated_back(doctor):
    folder = doctor.cache / "blendhub" / "disk" / "ab"
    folder.mkdir(parents=True)
    (folder / "chunk").touch()
    os.utime(folder / "chunk", (0, time.time() + 86400))
    found = doctor.mends(*CLOCK)
    assert found["verdict"] == "warn" and "1 files of the store" in found["sentence"]


def test_a_time_namespace_is_found(doctor):
    within = ["unshare", "--time", "--boottime", "86400", "--fork"]
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot have a time namespace; root can, on Linux 5.6 and later")
    found = doctor(*CLOCK, within=within).only("warn")
    assert "a time namespace shifts boottime by 86400 s" in found["sentence"]
    assert doctor(*CLOCK).only("ok")


def test_a_socket_that_a_killed_hub_left_is_removed(doctor, shm):
    (doctor.runtime / "blendhub").mkdir(mode=0o700)
    embedded = doctor.temporary / "blendhub-abcdefgh"
    embedded.mkdir(mode=0o700)
    for folder in (doctor.runtime / "blendhub", embedded):
        listening(folder / "hub.sock").close()
    found = doctor.mends(*LEFTOVERS, within=shm("size=1m"))
    assert found["verdict"] == "warn" and "2 sockets are left" in found["sentence"]
    with listening(embedded / "hub.sock"):
        assert doctor(*LEFTOVERS, within=shm("size=1m")).only("ok")


KILLED = """
import os, signal, sys, time
from blendhub.hub.memory.arena import Arena

arena = Arena(2**26)
print(arena.name.segment, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.alone
def test_shared_memory_that_a_killed_hub_left_is_freed(doctor):
    hub = subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert hub.stdout
    segment = Path("/dev/shm", hub.stdout.readline().strip())
    time.sleep(5.1)  # a younger one may be of a hub that has not locked it yet
    assert doctor(*LEFTOVERS).only("ok")
    hub.send_signal(signal.SIGKILL)
    hub.wait()
    assert segment.exists()
    found = doctor.mends(*LEFTOVERS)
    assert found["verdict"] == "warn" and "killed hubs left 0.06 GiB of shared memory" in found["sentence"]
    assert not segment.exists()
