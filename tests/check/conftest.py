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
        everything = {**os.environ, "XDG_RUNTIME_DIR": str(self.home), **environment}
        command = [*within, *CHECK, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=everything, timeout=250)
        assert done.stdout, done.stderr
        return Report(done.returncode, [finding.groupdict() for finding in LINE.finditer(done.stdout)])

    def mends(self, *arguments: str, within: Sequence[str] = ()) -> dict[str, Any]:
        """The worst finding. Following its command, in the place where it was given, leaves none of that verdict."""
        before = self(*arguments, within=within)
        finding = min(before.findings, key=lambda finding: ("fail", "warn", "ok").index(finding["verdict"]))
        assert finding["command"], before
        after = self(*arguments, within=[*within, "bash", "-c", f'{finding["command"]} && exec "$@"', "sh"])
        assert finding["verdict"] not in {left["verdict"] for left in after.findings}, after
        return finding

    def toml(self, text: str) -> str:
        """A configuration of a hub."""
        file = self.home / "hub.toml"
        file.write_text(text)
        return str(file)


@pytest.fixture
def check() -> Iterator[Checker]:
    # The path of a Unix socket is short, and so must this be.
    with tempfile.TemporaryDirectory(prefix="check-", dir="/tmp") as home:
        yield Checker(Path(home))


@pytest.fixture
def elsewhere() -> Any:
    """Makes commands that run others in a mount namespace, after a script."""
    skip_unless_permitted(["unshare", "--mount"])
    return lambda script: ["unshare", "--mount", "bash", "-c", f'set -e; {script}; exec "$@"', "sh"]


@pytest.fixture
def shm(elsewhere: Any) -> Any:
    """A separate ``/dev/shm`` with these options."""
    return lambda options: elsewhere(f"mount -t tmpfs -o {options} tmpfs /dev/shm")
