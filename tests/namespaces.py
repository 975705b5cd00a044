"""Skips tests that need namespaces of Linux, where this process may not make them."""

import subprocess
from collections.abc import Sequence

import pytest


def skip_unless_permitted(within: Sequence[str]) -> None:
    """``within``: the start of a command, such as ``unshare --mount``, that runs another one in new namespaces."""
    try:
        subprocess.run([*within, "true"], check=True, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"namespaces need util-linux: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"namespaces cannot be made here, they need root: {error.stderr.strip()}")
