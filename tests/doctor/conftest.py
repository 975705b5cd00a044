"""Runs ``blendhub doctor`` in places where something is wrong, and what it says that mends it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.namespaces import skip_unless_permitted

DOCTOR = [sys.executable, "-m", "blendhub.cli", "doctor", "--json"]

MEND = """
import json, subprocess, sys

def examine():
    return json.loads(subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True).stdout)

before = examine()
for finding in before["findings"]:
    if finding["command"]:
        subprocess.run(finding["command"], shell=True, check=True, stdout=sys.stderr)
print(json.dumps([before, examine()]))
"""
"""Follows the advice, in the place where it was given, and examines that place again."""


class Report(NamedTuple):
    code: int
    findings: list[dict[str, Any]]
    text: str

    def only(self, verdict: str) -> dict[str, Any]:
        """The one finding with this verdict, which is the worst."""
        assert self.code == {"ok": 0, "fail": 1, "warn": 3}[verdict]
        (found,) = [finding for finding in self.findings if finding["verdict"] == verdict]
        assert found["command"] or verdict == "ok"
        return found


class Doctor:
    """``blendhub doctor`` with its user's directories in a place that is new for each test."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.runtime, self.cache, self.temporary = (home / name for name in ("run", "cache", "tmp"))
        for folder in (self.runtime, self.cache, self.temporary):
            folder.mkdir(mode=0o700)

    def __call__(self, *arguments: str, within: Sequence[str] = (), **environment: str) -> Report:
        done = self._run([*within, *DOCTOR, *arguments], environment)
        assert done.stdout, done.stderr
        return Report(done.returncode, json.loads(done.stdout)["findings"], done.stdout)

    def mends(self, *arguments: str, within: Sequence[str] = (), **environment: str) -> dict[str, Any]:
        """The worst finding. Following its command leaves none like it; a busy machine may have slow memory besides."""
        done = self._run([*within, sys.executable, "-c", MEND, *DOCTOR, *arguments], environment)
        assert done.returncode == 0, done.stderr
        before, after = json.loads(done.stdout)
        (found,) = [finding for finding in before["findings"] if finding["verdict"] == before["worst"]]
        assert before["worst"] != "ok" and before["worst"] not in {one["verdict"] for one in after["findings"]}
        return found

    def toml(self, text: str) -> str:
        """A configuration of a hub."""
        file = self.home / "hub.toml"
        file.write_text(text)
        return str(file)

    def _run(self, command: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        places = {
            "HOME": self.home,
            "XDG_RUNTIME_DIR": self.runtime,
            "XDG_CACHE_HOME": self.cache,
            "TMPDIR": self.temporary,
        }
        everything = {**os.environ, **{name: str(path) for name, path in places.items()}, **environment}
        return subprocess.run(command, capture_output=True, text=True, env=everything, timeout=250)


@pytest.fixture
def doctor() -> Iterator[Doctor]:
    # The path of a Unix socket is short, and so must this be.
    with tempfile.TemporaryDirectory(prefix="dr-", dir="/tmp") as home:
        yield Doctor(Path(home))


@pytest.fixture
def elsewhere() -> Any:
    """Makes commands that run others in a mount namespace, after a script."""
    skip_unless_permitted(["unshare", "--mount"])

    def place(script: str, *arguments: str) -> list[str]:
        count = len(arguments)
        return ["unshare", "--mount", "bash", "-c", f'set -e; {script}; shift {count}; exec "$@"', "sh", *arguments]

    return place


@pytest.fixture
def shm(elsewhere: Any) -> Any:
    """A separate ``/dev/shm`` with these options."""
    return lambda options: elsewhere('mount -t tmpfs -o "$1" tmpfs /dev/shm', options)
