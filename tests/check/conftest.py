"""Runs ``blendhub check`` in places where something is wrong, and what it says that mends it."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.namespaces import skip_unless_permitted

CHECK = [sys.executable, "-m", "blendhub.cli", "check"]
LINE = re.compile(r"^(?P<verdict>ok|warn|fail) +\S+ +(?P<sentence>.*)(?:\n +mend: (?P<command>.*))?$", re.M)


class Report(NamedTuple):
    code: int
    findings: list[dict[str, Any]]

    def only(self, verdict: str) -> dict[str, Any]:
        """The one finding with this verdict, which is the worst."""
        assert self.code == {"ok": 0, "fail": 1, "warn": 3}[verdict], self
        (finding,) = [finding for finding in self.findings if finding["verdict"] == verdict]
        return finding


class Checker:
    """``blendhub check`` with its user's directories in a place that is new for each test."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __call__(self, *arguments: str, within: Sequence[str] = (), **environment: str) -> Report:
        done = self._run([*within, *CHECK, *arguments], environment)
        assert done.stdout, done.stderr
        return Report(done.returncode, [found.groupdict() for found in LINE.finditer(done.stdout)])

    def mends(self, *arguments: str, within: Sequence[str] = (), **environment: str) -> dict[str, Any]:
        """The worst finding. Following its command, in the place where it was given, leaves none of that name."""
        before = self(*arguments, within=within, **environment)
        (finding, *_) = sorted(before.findings, key=lambda one: ("fail", "warn", "ok").index(one["verdict"]))
        assert finding["command"], before
        followed = ["bash", "-c", f'{finding["command"]} && exec "$@"', "sh", *CHECK, *arguments]
        after = self._run([*within, *followed], environment)
        assert finding["verdict"] not in {one["verdict"] for one in LINE.finditer(after.stdout)}, after
        return finding

    def toml(self, text: str) -> str:
        """A configuration of a hub."""
        file = self.home / "hub.toml"
        file.write_text(text)
        return str(file)

    def _run(self, command: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        everything = {**os.environ, "XDG_RUNTIME_DIR": str(self.home), **environment}
        return subprocess.run(command, capture_output=True, text=True, env=everything, timeout=250)


@pytest.fixture
def check() -> Iterator[Checker]:
    # The path of a Unix socket is short, and so must this be.
    with tempfile.TemporaryDirectory(prefix="check-", dir="/tmp") as home:
        yield Checker(Path(home))


@pytest.fixture
def elsewhere() -> Any:
    """Makes commands that run others in a mount namespace, after a script."""
    skip_unless_permitted(["unshare", "--mount"])

    def place(script: str, *arguments: str) -> list[str]:
        return ["unshare", "--mount", "bash", "-c", f'set -e; {script}; shift {len(arguments)}; exec "$@"', "sh",
                *arguments]  # fmt: skip

    return place


@pytest.fixture
def shm(elsewhere: Any) -> Any:
    """A separate ``/dev/shm`` with these options."""
    return lambda options: elsewhere('mount -t tmpfs -o "$1" tmpfs /dev/shm', options)
