"""The table of vLLM's versions in docs/support.md: ``make test-vllm`` writes the row of the version that it has tested.

``python -m tests.vllm.version_table VERSION WHICH REPORT...`` does it from pytest's reports in JUnit's XML. ``WHICH``
of the tests ran: all, or the core.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
HEAD = "| vLLM | end-to-end tests | outcome | left out there |\n|---|---|---|---|\n"


def row_of(version: str, which: str, reports: Sequence[Path]) -> str:
    """What the tests did on a version."""
    did: Counter[str] = Counter()
    reasons = set()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
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


def with_row(page: str, row: str) -> str:
    """The page with this row in place of the version's former one, unless that one is of more tests."""
    before, rows, after = parts_of(page)
    version, which = row.split(" | ")[:2]
    if which != "all" and any(one.startswith(f"{version} | all | ") for one in rows):
        return page
    others = [one for one in rows if not one.startswith(f"{version} | ")]
    return before + HEAD + "".join(sorted([*others, row], key=_number)) + after


def parts_of(page: str) -> tuple[str, list[str], str]:
    """What stands before the table, its rows, and what stands after it."""
    before, rest = page.split(HEAD)
    n = len(re.match(r"(\|.*\n)*", rest)[0])
    return before, rest[:n].splitlines(keepends=True), rest[n:]


def _number(row: str) -> list[int]:
    return [int(part) for part in row.split(" ")[1].split(".")]


if __name__ == "__main__":
    made = row_of(sys.argv[1], sys.argv[2], [Path(name) for name in sys.argv[3:]])
    PAGE.write_text(with_row(PAGE.read_text(), made))
    print(made, end="")
