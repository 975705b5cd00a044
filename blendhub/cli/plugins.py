"""``blendhub plugins``: lists installed plugins, their capabilities, and the reasons why some cannot run."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from blendhub.framework.discovery import Plugin
from blendhub.framework.host import PluginHost

if TYPE_CHECKING:
    from rich.table import Table


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
    found = PluginHost.discover().plugins()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    elif not found:
        print("no plugins are installed; the matchers come with: pip install blendhub-matchers")
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(_table(found))
    else:
        print("\n".join("\t".join(cells) for cells in (HEADINGS, *map(_cells, found))))
    return 0


HEADINGS = ("kind", "name", "from", "api", "summary", "can do", "usable")


def _cells(plugin: Plugin) -> tuple[str, ...]:
    return (
        plugin.kind or "?",
        plugin.name,
        f"{plugin.distribution} {plugin.version}",
        "?" if plugin.api is None else str(plugin.api),
        plugin.summary,
        ", ".join(plugin.capabilities),
        _usable(plugin),
    )


def _usable(plugin: Plugin) -> str:
    if plugin.available:
        return "; ".join(("yes", *plugin.details))
    return f"no: {plugin.reason}; to change it: {plugin.remedy}" if plugin.remedy else f"no: {plugin.reason}"


def _table(found: list[Plugin]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(*HEADINGS, title="plugins", expand=False)
    for plugin in found:
        # Text, not markup: a reason may hold brackets.
        table.add_row(*map(Text, _cells(plugin)), style=None if plugin.available else "red")
    return table
