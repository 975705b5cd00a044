"""Outcomes on disk, before their report."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from blendhub.tools.advice.outcomes import Outcome


def kept(outcomes: Iterable[Outcome], folder: Path) -> list[Outcome]:
    """Write each outcome to a file as soon as it is measured: a run takes long, and may end before its report."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = []
    with (folder / "outcomes.jsonl").open("wb") as file:
        for outcome in outcomes:
            file.write(msgspec.json.encode(outcome) + b"\n")
            file.flush()
            measured.append(outcome)
    return measured
