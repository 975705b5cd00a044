"""Interpreters that have imported vLLM, which takes ten seconds; each forks a process for every engine."""

import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

PATIENCE_S = 300.0

MAIN = """
import sys
sys.path.append(sys.argv[1])
from harness.engines import template
sys.path.pop()
template.main(sys.argv[2])
"""
"""Finds this package, and nothing else of the repository: the interpreter may have vLLM, but not BlendHub."""


def interpreter(python: str, environment: Mapping[str, str], prepare: Sequence[str]) -> "Interpreter":
    """The one with this environment, which has imported the modules ``prepare`` before vLLM."""
    return _interpreter(python, frozenset(environment.items()), tuple(prepare))


# An interpreter holds 700 MB, and ends when neither this cache nor an engine refers to it.
@functools.lru_cache(maxsize=3)
def _interpreter(python: str, environment: frozenset[tuple[str, str]], prepare: tuple[str, ...]) -> "Interpreter":
    return Interpreter(python, dict(environment), prepare)


class Interpreter:
    """Ends when its pipe is closed, and the processes that it forked have ended."""

    def __init__(self, python: str, environment: Mapping[str, str], prepare: Sequence[str]) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="bh-interpreter-")
        log = Path(self._place.name) / "log"
        paths = [environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        with Listener(f"{self._place.name}/line", "AF_UNIX") as listener, log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-P", "-c", MAIN, str(Path(__file__).parents[2]), str(listener.address)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
            self._line = listener.accept()
        self._line.send(prepare)
        answer(self._line, log)

    def fork(self, log: Path, address: str) -> int:
        """The pid of a new process, which connects to the address and writes its output to ``log``."""
        self._line.send(("fork", str(log), address))
        pid: int = self._line.recv()
        return pid

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """Wait for the end of a process; None if it runs on."""
        self._line.send(("exit_code", pid, timeout_s))
        code: int | None = self._line.recv()
        return code


def answer(line: Connection, log: Path) -> Any:
    """The next answer of a process, which is raised if it is an exception."""
    if not line.poll(PATIENCE_S):
        raise TimeoutError(f"the engine did not answer in {PATIENCE_S:.0f} s:\n{_end_of(log)}")
    try:
        answer = line.recv()
    except (EOFError, ConnectionResetError):
        raise RuntimeError(f"the engine died:\n{_end_of(log)}") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-8000:]
