"""The row of a vLLM version in the table of docs/support.md, from pytest's reports in JUnit's XML.

``python -m tests.vllm.version_table VERSION WHICH REPORT...`` prints it. ``WHICH`` of the tests ran: all, or the core.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

HEAD = "| vLLM | end-to-end tests | outcome | left out there |\n|---|---|---|---|\n"


def row_of(version: str, which: str, reports: Sequence[Path]) -> str:
    """What the tests did on a version."""
    did: Counter[str] = Counter()
    reasons = set()
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            did["failed"] += 1
        elif skipped is not None:
            did["left out"] += 1
            reasons.add(skipped.get("message", ""))
        else:
            did["passed"] += 1
    counts = ", ".join(f"{did[how]} {how}" for how in ("passed", "failed", "left out") if did[how])
    return f"| {version} | {which} | {counts} | {'; '.join(sorted(reasons))} |\n"


if __name__ == "__main__":
    print(row_of(sys.argv[1], sys.argv[2], [Path(name) for name in sys.argv[3:]]), end="")
