"""Runs work in another process, so that a crash or a hang there becomes a finding here."""

import os
import signal
import subprocess
from typing import Any, NamedTuple

import msgspec

from blendhub.system.processes import importing_the_same, python_module


class Reply(NamedTuple):
    """The output of a child process, and the reason why it ended if it failed."""

    reports: list[dict[str, Any]]
    trouble: str


def ask(module: str, *arguments: str, timeout_s: float) -> Reply:
    """Run ``python -m MODULE FD ARGUMENTS``, which writes a line of JSON to ``FD`` for each thing that it found."""
    readable, written = os.pipe()
    with open(readable, "rb") as reports:
        try:
            process = subprocess.Popen(
                python_module(module, str(written), *arguments),
                pass_fds=[written],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=importing_the_same(),
                start_new_session=True,
            )
        finally:
            os.close(written)
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # With the processes that it started: they hold its output, which is read to the end.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Reply(_read(reports), f"it did not end within {timeout_s:g} s")
        return Reply(_read(reports), _trouble(process.returncode, errors.decode(errors="replace")))


def _read(reports: Any) -> list[dict[str, Any]]:
    # The last line is incomplete if the child died while it wrote it.
    return [msgspec.json.decode(line) for line in reports if line.endswith(b"\n")]


def _trouble(code: int, errors: str) -> str:
    if not code:
        return ""
    how = f"signal {-code} ended it" if code < 0 else f"it ended with exit code {code}"
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return f"{how}: {last}" if last else how
