"""The result of every check."""

from collections.abc import Iterable
from typing import Literal

import msgspec

Verdict = Literal["ok", "warn", "fail"]
FROM_WORST: tuple[Verdict, ...] = ("fail", "warn")


class Finding(msgspec.Struct, frozen=True):
    """One line: what a check found."""

    verdict: Verdict
    sentence: str
    command: str = ""
    """The command that repairs the fault; empty only where nothing is wrong."""
    check: str = ""
    """The name of the check that found it."""


def ok(sentence: str) -> Finding:
    return Finding("ok", sentence)


def warn(sentence: str, command: str) -> Finding:
    """BlendHub works, but worse than it could, or not for long."""
    return Finding("warn", sentence, command)


def fail(sentence: str, command: str) -> Finding:
    """Something does not work, or is not safe."""
    return Finding("fail", sentence, command)


def worst(findings: Iterable[Finding]) -> Verdict:
    found = {finding.verdict for finding in findings}
    return next((verdict for verdict in FROM_WORST if verdict in found), "ok")
