"""Runs one test of a conformance suite on a plugin with a fault as pytest does, with its fixtures and parameters."""

import os
import uuid
from pathlib import Path

import pytest

QUIETLY = [f"-pno:{plugin}" for plugin in ("terminal", "cacheprovider", "xdist", "faulthandler", "unraisableexception")]
"""The last of them looks twice for garbage in all that the process around has imported, which takes a second."""


def passes(module: str, fault: str, test: str, folder: Path) -> bool:
    """Whether the test, or without a name the whole suite, passes. ``suite_of(fault)`` of the module is its class."""
    file = folder / f"test_{uuid.uuid4().hex}.py"
    file.write_text(f"from {module} import suite_of\n\n\nclass TestOfAFault(suite_of({fault!r})): ...\n")
    code = pytest.main(
        [f"{file}::TestOfAFault{test and '::'}{test}", "-c", os.devnull, "--rootdir", str(folder), *QUIETLY]
    )
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"pytest ended with {code!r}"
    return code == pytest.ExitCode.OK


def all_tests(suite: type) -> set[str]:
    """The tests of a suite, each of which a faulty plugin has to prove."""
    return {name for name in dir(suite) if name.startswith("test_")}
