"""What all tests of the repository share."""

from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


@pytest.fixture
def without_shrinking() -> Iterator[None]:
    """Skip shrinking in tests for which any failure is enough: smaller examples of a failure help only authors."""
    before = settings.default
    settings.register_profile("without shrinking", phases=[Phase.generate])
    settings.load_profile("without shrinking")
    yield
    settings.register_profile("before", before)
    settings.load_profile("before")
