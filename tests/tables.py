"""The tables of docs/ that follow from the code: ``python -m tests.tables``, which is ``make tables``, writes them.

What a field means, and what to do about a reason, is written in the table itself; names and places come from the code.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from blendhub_fleet.options import FleetOptions

from blendhub import PluginHost
from blendhub.framework import hookspecs
from blendhub.framework.builtin_plugins import HOMES
from blendhub.framework.options import describe_options
from blendhub.hub.config import HubConfig, Listen
from blendhub.outcome import report
from blendhub.outcome.fates import LETTERS, Fate
from blendhub.outcome.reasons import Why
from blendhub.vllm.settings import RequestSettings, ReusePolicy, Settings
from tests import support
from tests.metric_names import OF_HUB
from tests.public_api import PUBLIC

DOCS = Path(__file__).parent.parent / "docs"
STRUCTS: list[type[msgspec.Struct]] = [
    hookspecs.PluginSpec,
    *(report.Outcome, report.ReusedSpans, report.AuditOutcome, report.RepairOutcome, report.DoubtOutcome),
]

FAR_AWAY = 2**12
"""A bound that no one reaches by mistake."""

Rows = Callable[[list[str]], list[str]]
"""The rows of a table, made of those that stand there."""


def rows_of_options(struct: type[msgspec.Struct], _: list[str]) -> list[str]:
    defaults = {field.name: default_of(field) for field in msgspec.structs.fields(struct)}
    rows = []
    shared = FleetOptions.__struct_fields__ if struct is not FleetOptions and issubclass(struct, FleetOptions) else ()
    for option in describe_options(struct):
        if option["name"] in shared:
            continue
        default = defaults[option["name"]]
        shown = "none" if default in (None, msgspec.NODEFAULT) else f"`{json.dumps(as_written(default))}`"
        kind = option["type"].removesuffix(" or null").replace("any", "object").replace("' or '", "', '")
        is_told_by_default = shown != "none" and not re.search("'| or ", kind)
        valid = ["" if is_told_by_default else kind, bounds_of(option["bounds"])]
        cell = "; ".join(filter(None, [shown, ", ".join(filter(None, valid))]))
        rows.append(f"| `{option['name']}` | {cell} | {option['description']} |")
    return rows


def bounds_of(bounds: dict[str, Any]) -> str:
    """The bounds of an option that a reader needs. That a size or a time is not negative goes without saying."""
    least, most = (bounds.get(f"{end}imum", bounds.get(f"{end}Items")) for end in ("min", "max"))
    if most is None or most >= FAR_AWAY:
        return ""
    return f"at most {most}" if least is None else f"{least} to {most}" + " entries" * ("maxItems" in bounds)


def as_written(value: object) -> object:
    """A default as a person would write it: only what differs from the defaults within it."""
    if isinstance(value, tuple):
        return [as_written(part) for part in value]
    if not isinstance(value, msgspec.Struct):
        return value
    fields = msgspec.structs.fields(value)
    values = {field.name: getattr(value, field.name) for field in fields}
    return {field.name: as_written(values[field.name]) for field in fields if values[field.name] != default_of(field)}


def default_of(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def rows_of_fields(struct: type[msgspec.Struct], rows: list[str]) -> list[str]:
    meanings = {row.split("`")[1]: row.rsplit(" | ", 1)[1] for row in rows}
    made = []
    for field in msgspec.structs.fields(struct):
        cells = [f"| `{field.name}`", meanings.get(field.name, "to be written |")]
        if struct is hookspecs.PluginSpec:  # observers make no records
            cells.insert(1, "required" if field.required else "optional")
        made.append(" | ".join(cells))
    return made


def rows_of_reasons(rows: list[str]) -> list[str]:
    remedies = {row.split("`")[1]: row.rsplit(" | ", 1)[1] for row in rows}
    return [f"| `{why}` | {why.message} | {remedies.get(why, 'to be written |')}" for why in Why]


def rows_of_modules(rows: list[str]) -> list[str]:
    if not find_spec("torch"):  # which devices need
        return rows
    first_lines = {module: (import_module(module).__doc__ or "").partition("\n")[0].rstrip(".") for module in PUBLIC}
    return [f"| `{module}` | {line} |" for module, line in first_lines.items()]


def tables() -> dict[tuple[str, str], Rows]:
    """Each table, by its page and the heading, or the first row, that it stands under."""
    made: dict[tuple[str, str], Rows] = {
        ("settings.md", "### `blendhub`"): partial(rows_of_options, Settings),
        ("settings.md", "### `policy`"): partial(rows_of_options, ReusePolicy),
        ("settings.md", "## Settings of a request"): partial(rows_of_options, RequestSettings),
        ("settings.md", "### `hub.toml`"): partial(rows_of_options, HubConfig),
        ("settings.md", "### `[[listen]]`"): partial(rows_of_options, Listen),
        ("settings.md", "### The stores of a fleet"): partial(rows_of_options, FleetOptions),
        ("reports.md", "| letter | what |"): lambda _: [f"| `{LETTERS[fate]}` | {fate.label} |" for fate in Fate],
        ("reports.md", "| reason | why it was computed | what to change |"): rows_of_reasons,
        ("plugins.md", "## What a plugin may import"): rows_of_modules,
        ("support.md", "## Versions of vLLM"): support.rows_of_versions,
        ("support.md", "## Models"): partial(support.rows_of_claims, support.MODELS),
        ("support.md", "## Attention backends"): partial(support.rows_of_claims, support.BACKENDS),
        ("watch.md", "## The hub's metrics"): lambda _: [
            f"| `blendhub_{name}` | {about} |" for name, about in OF_HUB.items()
        ],
    }
    host = PluginHost.discover()
    for kind, name in HOMES:
        options = host.offered(kind, name).options
        if msgspec.structs.fields(options):
            made["settings.md", f"### `{kind} {name}`"] = partial(rows_of_options, options)
    made |= {("plugins.md", f"### {struct.__name__}"): partial(rows_of_fields, struct) for struct in STRUCTS}
    try:
        from tests.metric_names_of_vllm import OF_ENGINE
    except ImportError:  # without vLLM, what is written stays
        return made
    engine = [f"| `vllm:blendhub_{name}` | {about.removesuffix('.')} |" for name, about in OF_ENGINE.items()]
    return made | {("reports.md", "## Metrics"): lambda _: engine}


def generated(page: str) -> str:
    """The text of a page with its tables as they should be."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for (on, heading), rows in tables().items():
        if on == page:
            at = f"\n{text}".index(f"\n{heading}\n")
            start = text.index("\n", text.index("\n|--", at) + 1) + 1
            old = re.match(r"(?:\|.*\n)*", text[start:])
            assert old, heading
            written = "".join(f"{row}\n" for row in rows(old[0].splitlines()))
            text = text[:start] + written + text[start + len(old[0]) :]
    return text


def pages() -> list[str]:
    return sorted({page for page, _ in tables()})


if __name__ == "__main__":
    for each in pages():
        (DOCS / each).write_text(generated(each), encoding="utf-8")
