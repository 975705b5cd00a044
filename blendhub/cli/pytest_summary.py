"""A pytest plugin for ``blendhub conformance``: ends with what failed, and one line that sums up."""

from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes seconds, or starts processes")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tests that were all skipped prove nothing either."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus == pytest.ExitCode.OK and "passed" not in reporter.stats:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    failed = [report.nodeid.rpartition("::")[2] for report in (*stats.get("failed", ()), *stats.get("error", ()))]
    if failed:
        terminalreporter.section("tests of the contract that failed")
        terminalreporter.write("".join(f"{name}\n" for name in failed))
    n_passed, n_skipped = len(stats.get("passed", ())), len(stats.get("skipped", ()))
    terminalreporter.write(f"\nconformance: {n_passed} passed, {len(failed)} failed, {n_skipped} do not apply\n")
    if not n_passed and not failed:
        terminalreporter.write("nothing ran, so nothing is proven; does the expression after -k match a test?\n")
