"""The command ``blendhub``: one module a command, each with ``add_parser`` and ``run``."""

import argparse
import sys
from collections.abc import Sequence

import blendhub
from blendhub.cli import advise, analyze, check, conformance, explain, forget, keys, plugins, serve, warm
from blendhub.cli.serve import stop_printing
from blendhub.core.errors import BlendHubError

READER_GONE = 141
"""The exit code that shells know for a program whose output nobody reads any more, as behind ``| head``."""

COMMANDS = (serve, explain, forget, check, analyze, advise, warm, keys, plugins, conformance)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 well, 1 it found a fault, 2 it could not be done, 3 a warning."""
    parser = argparse.ArgumentParser(prog="blendhub", description=blendhub.__doc__)
    parser.add_argument("--version", action="version", version=f"blendhub {blendhub.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    code = READER_GONE
    try:
        code = int(chosen.run(chosen))
        sys.stdout.flush()
    except BlendHubError as error:
        print(f"blendhub: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        stop_printing()
    return code
