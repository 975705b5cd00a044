"""The conformance suite, run on each built-in selector as ``blendhub conformance`` runs it."""

from typing import Any

import pytest

from blendhub import PluginHost
from blendhub.testing import SelectorSuite

HOST = PluginHost.discover()
IN_WINDOWS = {"signal": "k", "layer": 3, "window_tokens": 4, "probe_share": 1.0}
AT_ENDS = {"window_tokens": 4, "layers": [0.0, 0.9], "attending_tokens": 64}


def suite(name: str, options: dict[str, Any]) -> Any:
    return SelectorSuite.of_installed(HOST, name, options)


class TestHkvd(suite("hkvd", {})):  # type: ignore[misc]
    pass


class TestAttended(suite("attended", {})):  # type: ignore[misc]
    pass


class TestFirstK(suite("first_k", {})):  # type: ignore[misc]
    pass


class OtherOptions:
    """What does not depend on options is tested once."""

    pytestmark = pytest.mark.slow
    test_a_process_with_another_hash_seed_agrees = None


class TestHkvdInWindows(OtherOptions, suite("hkvd", IN_WINDOWS)):  # type: ignore[misc]
    pass


class TestAttendedInWindows(OtherOptions, suite("attended", AT_ENDS)):  # type: ignore[misc]
    pass


class TestFirstKOfTheRatio(OtherOptions, suite("first_k", {"k": 0})):  # type: ignore[misc]
    pass
