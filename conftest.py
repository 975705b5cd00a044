"""What all tests of the repository share."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


WHOLLY_SLOW = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.slow\b", re.M)


class NotImported(pytest.File):
    """A file of which no test is wanted."""

    def collect(self) -> list[pytest.Item]:
        return []


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Leave files alone of which every test is slow if no slow test is wanted: importing them takes long, too."""
    if "not slow" in parent.config.option.markexpr and WHOLLY_SLOW.search(module_path.read_text()):
        return NotImported.from_parent(parent, path=module_path)
    return None


def pytest_collection_finish() -> None:
    """What was imported stays: a collection of garbage would look through all of it, for half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def without_shrinking() -> Iterator[None]:
    """Skip shrinking in tests for which any failure is enough: smaller examples of a failure help only authors."""
    before = settings.default
    settings.register_profile("without shrinking", phases=[Phase.generate])
    settings.load_profile("without shrinking")
    yield
    settings.register_profile("before", before)
    settings.load_profile("before")
