"""``blendhub check``: finds mistakes in the settings and what is wrong on this machine, and says what mends it."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from blendhub.cli.checks import configuration, machine, versions
from blendhub.cli.checks.subject import Finding, Subject, read_subject

CHECKS: Mapping[str, Callable[[Subject], Iterator[Finding]]] = MappingProxyType(
    {
        "settings": configuration.settings,
        "plugins": configuration.plugins,
        "shared-memory": machine.shared_memory,
        "hub": machine.hub,
        "versions": versions.versions,
    }
)
EXIT_CODES: Mapping[str, int] = MappingProxyType({"ok": 0, "warn": 3, "fail": 1})
"""By verdict, the worst of which is the last."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="find mistakes in the settings, and what is wrong on this machine",
        description="Check settings, plugins, shared memory, a running hub, and the versions of torch and vLLM. Each "
        "line says ok, warn or fail, and what mends it. Nothing is changed. Exits with 0 if all is well, 3 if the "
        "worst is a warning, 1 if something fails, and 2 if nothing could be checked.",
    )
    parser.add_argument(
        "config",
        metavar="FILE|JSON|-",
        nargs="?",
        default="",
        help="what `vllm serve --kv-transfer-config` is given: JSON, a file of it, or - for standard input; or a hub's "
        "configuration, if its name ends with .toml",
    )
    parser.add_argument("--device", metavar="NAME", help="what vLLM runs on (cuda, cpu, npu); default: any")
    parser.add_argument("--endpoint", metavar="EP", help="of a running hub; default: the configured one")
    parser.add_argument("--only", metavar="CHECK", action="append", choices=CHECKS, help=f"one of {', '.join(CHECKS)}")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, for a report or a script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    subject = read_subject(arguments.config, arguments.device)
    if arguments.endpoint:
        settings = msgspec.structs.replace(subject.settings, endpoint=arguments.endpoint)
        subject = msgspec.structs.replace(subject, settings=settings)
    names = arguments.only or [*CHECKS]
    if subject.mistake and "settings" not in names:
        names = ["settings", *names]
    found = ((name, finding) for name in names for finding in CHECKS[name](subject))
    show = _as_json if arguments.json else _line_by_line
    return EXIT_CODES[max(["ok", *show(found)], key=[*EXIT_CODES].index)]


def _line_by_line(found: Iterator[tuple[str, Finding]]) -> list[str]:
    """Print each finding when it is there; returns the verdicts."""
    verdicts = []
    for name, finding in found:
        verdicts.append(finding.verdict)
        print(f"{finding.verdict:<5}{name:<14} {finding.sentence}", flush=True)
        if finding.command:
            print(f"{'':<20}mend: {finding.command}", flush=True)
    return verdicts


def _as_json(found: Iterator[tuple[str, Finding]]) -> list[str]:
    findings = [{"check": name, **msgspec.structs.asdict(finding)} for name, finding in found]
    print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    return [finding["verdict"] for finding in findings]
