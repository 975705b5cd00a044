"""Which tests were skipped for want of a package: ``python -m tests.missing_parts REPORT...``, in JUnit's XML.

A line for each command that installs what is missing: how many tests, or files of tests, were skipped, and why.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

COMMAND = re.compile(r"\bmake setup\b|\b(?:apt-get|pip) install .*")


def lines_of(reports: Iterable[Path]) -> Iterator[str]:
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for reason in _reasons(reports):
        if command := COMMAND.search(reason):
            reasons[command[0]][reason] += 1
    for why in reasons.values():
        yield f"skipped {why.total():,}: {why.most_common(1)[0][0]}"


def _reasons(reports: Iterable[Path]) -> Iterator[str]:
    for report in reports:
        for skipped in ElementTree.parse(report).iter("skipped"):
            # A file that is skipped as a whole tells its reason in the text alone.
            whole_file = re.search(r"Skipped: (.*?)['\"]\)", skipped.text or "")
            yield whole_file[1] if whole_file else skipped.get("message", "")


if __name__ == "__main__":
    for line in lines_of(map(Path, sys.argv[1:])):
        print(line)
