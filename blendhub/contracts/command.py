"""The contract of commands: what ``blendhub NAME`` does."""

import argparse
from abc import ABC, abstractmethod


class Command(ABC):
    """A command that a plugin adds to ``blendhub``; its name and its summary are those of its spec."""

    plugin_origin = ""

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments, its description and its epilog to a parser of its own."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Do what the arguments ask for; returns the exit code: 0 well, 1 it found a fault, 3 a warning.

        A BlendHubError is printed as one line, and the exit code is then 2.
        """
