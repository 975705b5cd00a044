"""A pytest plugin for ``blendhub conformance``: what to mend first, what failed, and one line that sums up."""

import re
from pathlib import Path
from textwrap import dedent, indent, wrap
from typing import Any

import pytest

import blendhub.testing
from blendhub.testing.sentences import place_of, sentence_of

SUITES = Path(blendhub.testing.__file__).parent
MAX_LINES = 30


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes seconds, or starts processes")


def pytest_exception_interact(node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
    """Keep what ``_first`` shows of a failure."""
    if isinstance(node, pytest.Function) and node.cls:
        assert call.excinfo
        # The test, or the fixture that failed before it.
        steps = [str(entry.getsource()) for entry in call.excinfo.traceback if SUITES in Path(entry.path).parents]
        report.did = re.sub(r"\A.*?(?=^def )", "", dedent(steps[0]), flags=re.S | re.M) if steps else node.name
        report.saw = call.excinfo.exconly()
        report.place, report.sentence = (asked(node.cls, node.originalname) for asked in (place_of, sentence_of))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tests that were all skipped prove nothing either."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus == pytest.ExitCode.OK and "passed" not in reporter.stats:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    reports = (*stats.get("failed", ()), *stats.get("error", ()))
    failed = [report.nodeid.rpartition("::")[2] for report in reports]
    known = [report for report in reports if getattr(report, "sentence", "")]
    if known:
        first = min(known, key=lambda report: report.place)
        terminalreporter.section("begin here: the first sentence of the contract that does not hold")
        terminalreporter.write("\n".join(wrap(first.sentence, 100)) + "\n")
        for title, text in (("what the test did", first.did), ("what it saw", first.saw)):
            lines = text.splitlines()
            shown = lines[:MAX_LINES] + ["..."] * (len(lines) > MAX_LINES)
            terminalreporter.write(f"\n{title}:\n" + indent("\n".join(shown), "    ") + "\n")
    if failed:
        terminalreporter.section("tests of the contract that failed")
        terminalreporter.write("".join(f"{name}\n" for name in failed))
    n_passed, n_skipped = len(stats.get("passed", ())), len(stats.get("skipped", ()))
    terminalreporter.write(f"\nconformance: {n_passed} passed, {len(failed)} failed, {n_skipped} do not apply\n")
    if not n_passed and not failed:
        terminalreporter.write("nothing ran, so nothing is proven; does the expression after -k match a test?\n")
