"""A plugin of pytest that writes down how each test has ended, and whether it asked BlendHub."""

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

OURS = bool(os.environ["PEERS_OURS"])
"""Whether BlendHub is in the place of what is tested."""
_tests: dict[str, tuple[bool, bool]] = {}
_asked = False


def asked() -> None:
    """Note that the running test asks BlendHub."""
    global _asked
    _asked = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _asked
    _asked = False
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    passed_so_far, _ = _tests.get(report.nodeid, (True, False))
    _tests[report.nodeid] = (passed_so_far and report.passed, _asked)


def pytest_sessionfinish() -> None:
    Path(os.environ["PEERS_RECORD"]).write_text(json.dumps(_tests))
