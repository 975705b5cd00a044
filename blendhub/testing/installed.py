"""The suite of the installed plugin that the environment names; ``blendhub conformance`` runs pytest on this file.

The environment carries the name because some tests start other processes, which must find the same plugin.
"""

import os

from blendhub.testing.target import VARIABLE, Target


class TestInstalled(Target.decode(os.environ[VARIABLE]).suite()):  # type: ignore[misc]
    """A class of this file, because the processes that tests start look for it here."""
