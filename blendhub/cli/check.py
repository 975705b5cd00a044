"""``blendhub check``: finds mistakes in the settings and what is wrong on this machine, and says what mends it."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blendhub.cli.checks import machine, software
from blendhub.cli.checks.finding import Finding, Subject, Verdict, fail, worst
from blendhub.cli.json_input import read_flag
from blendhub.core.errors import OptionError
from blendhub.framework.host import PluginHost
from blendhub.hub.config import load_config

CHECKS: Mapping[str, Callable[[Subject], Iterator[Finding]]] = MappingProxyType(
    {
        "settings": software.settings,
        "plugins": software.plugins,
        "shared-memory": machine.shared_memory,
        "hub": machine.hub,
        "versions": software.versions,
    }
)
EXIT_CODES: Mapping[Verdict, int] = MappingProxyType({"ok": 0, "fail": 1, "warn": 3})
COLOURS: Mapping[Verdict, str] = MappingProxyType({"ok": "32", "warn": "33", "fail": "1;31"})


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
        help="what `vllm serve --kv-transfer-config` is given: JSON, a file of it, or a configuration of `vllm serve` "
        "(JSON or YAML) that has the flag; - for standard input; or a hub's configuration, if its name ends with .toml",
    )
    parser.add_argument("--device", metavar="NAME", help="what vLLM runs on (cuda, cpu, npu); default: any")
    parser.add_argument("--endpoint", metavar="EP", help="of a running hub; default: the configured one")
    parser.add_argument("--only", metavar="CHECK", action="append", choices=CHECKS, help=f"one of {', '.join(CHECKS)}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = arguments.config or ""
    shared = {"host": PluginHost.discover(), "device": arguments.device, "endpoint": arguments.endpoint or ""}
    mistakes: list[Exception] = []
    subject = Subject(**shared)
    try:
        if config.endswith(".toml"):
            subject = Subject(**shared, toml=load_config(Path(config)))
        elif config:
            subject = Subject(**shared, flag=read_flag(config))
    except (ValueError, OptionError) as error:
        mistakes.append(error)
    found = [_shown("settings", fail(str(mistake))) for mistake in mistakes]
    for name in arguments.only or CHECKS:
        found += (_shown(name, finding) for finding in CHECKS[name](subject))
    return EXIT_CODES[worst(found)]


def _shown(check: str, finding: Finding) -> Verdict:
    """Print a finding as soon as it is there."""
    verdict, mend = f"{finding.verdict:<5}", "mend: "
    if sys.stdout.isatty():
        verdict, mend = f"\x1b[{COLOURS[finding.verdict]}m{verdict}\x1b[0m", f"\x1b[2m{mend}\x1b[0m"
    print(f"{verdict}{check:<14} {finding.sentence}", flush=True)
    if finding.command:
        print(f"{'':<20}{mend}{finding.command}", flush=True)
    return finding.verdict
