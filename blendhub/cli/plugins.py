"""``blendhub plugins``: lists installed plugins, their capabilities, and the reasons why some cannot run."""

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from blendhub.framework.discovery import Plugin
from blendhub.framework.host import PluginHost


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plugins",
        help="list the installed plugins",
        description="List every plugin object and observer installed here, with the reason why one cannot be used. "
        "Broken plugins are listed too and do not change the exit code.",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    plugins = PluginHost.discover().plugins()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(plugins)).decode())
    else:
        print("\n".join(line for plugin in plugins for line in _lines(plugin)) or "no plugins are installed")
    return 0


def _lines(plugin: Plugin) -> Iterator[str]:
    origin = f"{plugin.distribution} {plugin.version}, API {'?' if plugin.api is None else plugin.api}"
    yield f"{plugin.kind or '?':<10} {plugin.name:<17} {plugin.summary or '?'} ({origin})"
    if plugin.available:
        facts = [*(["can do " + ", ".join(plugin.capabilities)] if plugin.capabilities else []), *plugin.details]
        yield f"{'':<28} yes; {'; '.join(facts)}".rstrip("; ")
    else:
        remedy = f"; to change it: {plugin.remedy}" if plugin.remedy else ""
        yield f"{'':<28} no: {plugin.reason}{remedy}"
