"""Talks to the peer, which works in its own interpreter; only one side works at a time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class PeerProcess:
    """A script of this directory, run by the peer's interpreter; commands go as lines of JSON."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
        )

    def __call__(self, command: str, *given: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([command, *given]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the peer's process ended; its messages stand above")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)
