"""Skips tests that need namespaces of Linux, where this process may not make them."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from harness.servers.network import Network, NotPermitted


def skip_unless_permitted(within: Sequence[str]) -> None:
    """``within``: the start of a command, such as ``unshare --mount``, that runs another one in new namespaces."""
    try:
        subprocess.run([*within, "true"], check=True, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"namespaces need util-linux: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"namespaces cannot be made here, they need root: {error.stderr.strip()}")


@contextlib.contextmanager
def network_or_skip() -> Iterator[Network]:
    with contextlib.ExitStack() as closing:
        try:
            network = closing.enter_context(Network())
        except NotPermitted as error:
            pytest.skip(str(error))
        yield network
