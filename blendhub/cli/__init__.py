"""The command ``blendhub``: one module a command, each with ``add_parser`` and ``run``; and the commands of plugins."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import blendhub
from blendhub.cli import check, conformance, explain, forget, plugins, serve, warm
from blendhub.cli.serve import stop_printing
from blendhub.core.errors import BlendHubError, PluginError
from blendhub.framework.builtin_plugins import install_command
from blendhub.framework.host import PluginHost

READER_GONE = 141
"""The exit code that shells know for a program whose output nobody reads any more, as behind ``| head``."""

COMMANDS = (serve, explain, forget, check, warm, plugins, conformance)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 well, 1 it found a fault, 2 it could not be done, 3 a warning."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="blendhub", description=blendhub.__doc__)
    parser.add_argument("--version", action="version", version=f"blendhub {blendhub.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    code = READER_GONE
    try:
        add_commands_of_plugins(commands, next((word for word in words if not word.startswith("-")), ""))
        chosen = parser.parse_args(words)
        code = int(chosen.run(chosen))
        sys.stdout.flush()
    except BlendHubError as error:
        print(f"blendhub: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        stop_printing()
    return code


def add_commands_of_plugins(commands: Any, name: str) -> None:
    """The command of this name gets its arguments; the others are only listed."""
    host, own = PluginHost.discover(), {*commands.choices}
    if name in own:
        return
    for offered in host.names("command"):
        if offered in own:
            print(f"blendhub: a plugin's command {offered} is ignored: the core has one", file=sys.stderr)
            continue
        try:
            summary = host.offered("command", offered).summary
        except PluginError:
            summary = "cannot be used: `blendhub plugins` says why"
        parser = commands.add_parser(offered, help=summary)
        if offered == name:
            command = host.create("command", name)
            command.add_arguments(parser)
            parser.set_defaults(run=command.run)
    if name not in commands.choices and (missing := install_command("command", name)):
        raise PluginError(f"the command {name} comes with: {missing}")
