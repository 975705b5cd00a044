"""What all tests of the repository share."""

from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


# Where tests of a device run alone, pytest-xdist need not be installed.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.scheduling import Scheduling

    return Scheduling(config, log)
