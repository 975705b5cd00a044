"""What is wrong with sockets and stores: each fault is made, and mended by the advice."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOCKETS, STORES, LEFTOVERS = (["--only", name] for name in ("sockets", "stores", "leftovers"))


def listening(path: Path, mode: int = 0o600) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    path.chmod(mode)
    made.listen()
    return made


def folder(path: Path, mode: int = 0o700) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def file(path: Path, mode: int = 0o600) -> Path:
    path.touch()
    path.chmod(mode)
    return path


def listen(doctor, endpoint: str, options: str = "") -> list[str]:
    return ["--config", doctor.toml(f'[[listen]]\nendpoint = "{endpoint}"\noptions = {{{options}}}')]


def store(doctor, path: Path) -> list[str]:
    return ["--config", doctor.toml(f'[store]\noptions = {{path = "{path}"}}')]


def open_to_the_group(doctor):
    folder(doctor.runtime / "blendhub", 0o770)


def a_link(doctor):
    (doctor.runtime / "blendhub").symlink_to(doctor.cache)


def no_socket(doctor):
    file(folder(doctor.runtime / "blendhub") / "hub.sock")


def written_by_others(doctor):
    return listen(doctor, f"ipc://{folder(doctor.home / 'shared', 0o777)}/hub.sock")


def a_key_that_others_read(doctor):
    return listen(doctor, "tcp://127.0.0.1:0", f'secret_key = "{file(doctor.home / "server.secret", 0o640)}"')


def a_store_that_others_write(doctor):
    folder(doctor.cache / "blendhub" / "disk", 0o777)


def a_store_that_others_read(doctor):
    folder(doctor.cache / "blendhub" / "disk", 0o755)


def no_store(doctor):
    return store(doctor, file(doctor.home / "store"))


@pytest.mark.parametrize(
    "check, fault, verdict, sentence",
    [
        (SOCKETS, open_to_the_group, "fail", "others can enter ~/run/blendhub"),
        (SOCKETS, a_link, "fail", "it is not a directory of uid"),
        (SOCKETS, no_socket, "fail", "is not a socket"),
        (SOCKETS, written_by_others, "fail", "others can replace a hub's socket in ~/shared"),
        (SOCKETS, a_key_that_others_read, "warn", "others can read the secret key ~/server.secret"),
        (STORES, a_store_that_others_write, "fail", "others can write to the KV in"),
        (STORES, a_store_that_others_read, "warn", "others can read the KV in"),
        (STORES, no_store, "fail", "is not a directory"),
    ],
)
def test_a_fault_is_named_with_the_command_that_mends_it(doctor, check, fault, verdict, sentence):
    found = doctor.mends(*check, *(fault(doctor) or ()))
    assert found["verdict"] == verdict and sentence in found["sentence"]
    assert doctor.cache.is_dir(), "what a link leads to stays"


@pytest.mark.parametrize("mode, verdict", [(0o666, "fail"), (0o644, "warn")])
def test_a_socket_that_others_reach_is_closed_to_them(doctor, mode, verdict):
    with listening(folder(doctor.runtime / "blendhub") / "hub.sock", mode):
        assert doctor.mends(*SOCKETS)["verdict"] == verdict


def test_where_nothing_is_wrong_everything_is_ok(doctor):
    assert "a hub can listen at ipc://~/run/blendhub/hub.sock" in doctor(*SOCKETS).only("ok")["sentence"]
    assert "no store is configured" in doctor(*STORES).only("ok")["sentence"]
    # As in /tmp: only the owner of a file can rename it.
    shared = folder(doctor.home / "shared", 0o1777)
    assert doctor(*SOCKETS, *listen(doctor, f"ipc://{shared}/hub.sock")).only("ok")


def test_places_where_no_socket_can_be_are_named(doctor):
    found = doctor(*SOCKETS, XDG_RUNTIME_DIR=str(doctor.home / "missing")).only("fail")
    assert "cannot be made" in found["sentence"] and found["command"] == "unset XDG_RUNTIME_DIR"
    found = doctor(*SOCKETS, *listen(doctor, f"ipc:///tmp/{'x' * 100}/hub.sock")).only("fail")
    assert "has 114 bytes, more than 107" in found["sentence"]
    found = doctor(*SOCKETS, TMPDIR=str(folder(doctor.home / ("x" * 90)))).only("fail")
    assert "the socket of an embedded hub" in found["sentence"] and found["command"] == "export TMPDIR=/tmp"


def test_a_store_on_a_disk_that_takes_no_more_is_found(doctor, elsewhere):
    path = folder(doctor.home / "store")
    within = elsewhere('mount -t tmpfs -o size=2g,mode=700 tmpfs "$1"; mount -o remount,ro "$1"', str(path))
    found = doctor.mends(*STORES, *store(doctor, path), within=within)
    assert found["verdict"] == "fail" and "mounted read-only" in found["sentence"]
    found = doctor(*STORES, *store(doctor, path / "below"), within=within).only("fail")
    assert "this user cannot make it in ~/store" in found["sentence"] and "install -d -m 700" in found["command"]
    within = elsewhere('mount -t tmpfs -o size=4m,mode=700 tmpfs "$1"', str(path))
    assert "has 4 MiB left" in doctor(*STORES, *store(doctor, path), within=within).only("warn")["sentence"]


def test_a_socket_that_a_killed_hub_left_is_removed(doctor, shm):
    embedded = folder(doctor.temporary / "blendhub-abcdefgh")
    for place in (folder(doctor.runtime / "blendhub"), embedded):
        listening(place / "hub.sock").close()
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
