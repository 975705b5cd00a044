"""An environment in which our distributions come from their wheels alone, and every other one is linked from this
environment, if a distribution there says that it needs it.

What the metadata leaves out is therefore missing there, and nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

KERNELS = Path(__file__).parents[1] / "plugins/matchers/blendhub_matchers/rolling_kernels.py"


def with_needs(wanted: Iterable[str], wheels: Path | None = None) -> dict[str, Distribution]:
    """The distributions that these requirements need, with all that those need, as far as they are installed here.

    Ours are read from wheels if there is a folder with them.
    """
    ours = dict(map(_of_wheel, wheels.glob("*.whl"))) if wheels else {}
    found: dict[str, Distribution] = {}
    seen, waiting = set[tuple[str, str]](), [Requirement(line) for line in wanted]
    while waiting:
        each = waiting.pop()
        name = canonicalize_name(each.name)
        try:
            of = ours.get(name) or distribution(name)
        except PackageNotFoundError:  # it is for other machines
            continue
        found[name] = of
        for extra in {"", *each.extras} - {extra for seen_name, extra in seen if seen_name == name}:
            seen.add((name, extra))
            needs = map(Requirement, of.requires or [])
            waiting += [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    return found


def _of_wheel(wheel: Path) -> tuple[str, Distribution]:
    (info,) = (folder for folder in ZipPath(wheel).iterdir() if folder.name.endswith(".dist-info"))
    read = PathDistribution(info)
    return canonicalize_name(read.metadata["Name"]), read


class FreshEnvironment:
    """Has installed what is wanted, with ours from the wheels, and beside it what other distributions need."""

    def __init__(self, folder: Path, wheels: Path, wanted: str, *beside: str) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.bin = folder / "bin"
        (site,) = folder.glob("lib/python*/site-packages")
        for name, of in with_needs([wanted, *beside], wheels).items():
            if not name.startswith("blendhub"):
                _link(of, site)
        install = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet"]
        alone = ["--no-index", "--find-links", str(wheels), "--no-compile", "--disable-pip-version-check"]
        done = subprocess.run([*install, *alone, wanted], env=self._variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        _take_compiled(site)

    @property
    def _variables(self) -> dict[str, str]:
        """Those of a person who has activated this environment."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
        engine = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # one process imports less
        return kept | {"PATH": f"{self.bin}:{os.environ['PATH']}", **engine}

    def begin(self, *command: str, place: Path) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command, cwd=place, env=self._variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *command: str, place: Path) -> tuple[int, str]:
        """The exit code of a command, and what it prints."""
        running = self.begin(*command, place=place)
        printed, _ = running.communicate()
        return running.returncode, printed


def _link(of: Distribution, site: Path) -> None:
    for top in {file.parts[0] for file in of.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        link, target = site / top, Path(str(of.locate_file(top)))
        if not link.exists() and target.exists():
            link.symlink_to(target)


def _take_compiled(site: Path) -> None:
    """Take over the kernels that are compiled here. Numba compiles again what has other sources, and knows the file of
    the kernels by its time and size."""
    installed = site / "blendhub_matchers" / KERNELS.name
    if installed.exists() and (KERNELS.parent / "__pycache__").exists():
        shutil.copystat(KERNELS, installed)
        (installed.parent / "__pycache__").mkdir(exist_ok=True)
        for compiled in (KERNELS.parent / "__pycache__").glob("*.nb[ci]"):
            shutil.copy(compiled, installed.parent / "__pycache__")
