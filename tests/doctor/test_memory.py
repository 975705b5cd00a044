"""What is wrong with memory: each fault is made in a mount namespace or a control group, and mended there."""

import os
from pathlib import Path

import pytest

from blendhub.hub.memory import default_size as memory

pytestmark = pytest.mark.slow

ENOUGH = "size=4g,huge=advise"


FLAG = '{"kv_connector_extra_config": {"blendhub": {"hub": {"arena_gib": 0.5}}}}'
TOO_LARGE = "less than the configured arena of 0.50 GiB"


@pytest.mark.parametrize(
    "options, config, verdict, sentence",
    [
        ("size=64m", "", "warn", "0.06 GiB free, so an arena would have 0.03 GiB"),
        ("size=64m", "arena_gib = 0.5", "fail", TOO_LARGE),
        ("size=8g,ro", "", "fail", "cannot create files"),
    ],
    ids=["small", "smaller than the arena", "read-only"],
)
def test_shared_memory_is_made_larger_or_writable(doctor, shm, options, config, verdict, sentence):
    found = doctor.mends("--only", "shared-memory", "--config", doctor.toml(config), within=shm(options))
    assert found["verdict"] == verdict and sentence in found["sentence"]
    assert found["command"].startswith("mount -o remount,")


def test_the_arena_of_a_configuration_of_vllm_counts_too(doctor, shm):
    found = doctor("--only", "shared-memory", "--config", FLAG, within=shm("size=64m")).only("fail")
    assert TOO_LARGE in found["sentence"]


def test_shared_memory_on_a_disk_is_replaced(doctor, elsewhere):
    (doctor.home / "disk").mkdir()
    within = elsewhere('mount --bind "$1" /dev/shm', str(doctor.home / "disk"))
    found = doctor.mends("--only", "shared-memory", within=within)
    assert found["verdict"] == "fail" and "is not in memory, but on" in found["sentence"]


def test_shared_memory_that_is_missing_is_mounted(doctor, elsewhere):
    devices = doctor.home / "dev"
    devices.mkdir()
    for name in ("null", "urandom"):
        os.mknod(devices / name, os.stat("/dev/null").st_mode, os.stat(f"/dev/{name}").st_rdev)
    found = doctor.mends("--only", "shared-memory", within=elsewhere('mount --bind "$1" /dev', str(devices)))
    assert found["verdict"] == "fail" and "/dev/shm does not exist" in found["sentence"]


def test_huge_pages_are_asked_for(doctor, shm):
    if "[force]" in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text():
        pytest.skip("this kernel forces huge pages on every file system in memory")
    found = doctor.mends("--only", "huge-pages", within=shm("size=64m"))
    assert found["verdict"] == "warn" and "gives the arena no huge pages" in found["sentence"]
    assert doctor("--only", "huge-pages", within=shm("size=64m,huge=within_size")).only("ok")


@pytest.fixture
def limited():
    """A real control group with little memory, and a command that runs others in it."""
    for group in memory._groups(Path("/")):
        limit = group.path / f"blendhub-doctor-{os.getpid()}"
        try:
            limit.mkdir()
            (limit / group.files.limits[0]).write_text(str(2**29))
        except OSError as error:
            if limit.exists():
                limit.rmdir()
            pytest.skip(f"needs the right to make control groups, as root has on its own machine: {error}")
        yield ["bash", "-c", f'echo $$ > {limit}/cgroup.procs && exec "$@"', "sh"]
        limit.rmdir()
        return
    pytest.skip("this machine does not limit memory by control groups")


def test_a_control_group_with_little_memory_is_widened(doctor, limited):
    found = doctor.mends("--only", "memory-limits", within=limited)
    assert found["verdict"] == "warn" and "so an arena would have 0.1" in found["sentence"]
    assert found["command"].startswith("echo ") and "blendhub-doctor-" in found["command"]


def test_an_arena_above_what_a_control_group_leaves_fails(doctor, limited):
    config = doctor.toml("arena_gib = 2")
    found = doctor("--only", "memory-limits", "--config", config, within=limited).only("fail")
    assert "the kernel would kill the hub" in found["sentence"]
    assert found["command"] == f"blendhub serve --config {config} --arena-gib 0.1".replace(str(doctor.home), "~")


def test_memory_that_is_enough_is_called_so(doctor, shm):
    config = doctor.toml("arena_gib = 0.5")
    for check in ("shared-memory", "memory-limits", "huge-pages"):
        assert doctor("--only", check, "--config", config, within=shm(ENOUGH)).only("ok")
