"""``blendhub doctor``: finds what is wrong on this machine, and names the commands that repair it."""

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import blendhub
from blendhub.cli.json_input import read_flag, read_object
from blendhub.core.errors import OptionError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.hub.config import load_config
from blendhub.tools.doctor.finding import Circumstances, Finding, Verdict, without_secrets, worst

EXIT_CODES: dict[Verdict, int] = {"ok": 0, "fail": 1, "warn": 3}
"""2 says that nothing could be examined."""

COLOURS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="find what is wrong on this machine",
        description="Examine this machine: versions, plugins, memory, permissions, leftovers of killed hubs, a real "
        "hub and each device. Each line says ok, warn or fail, and what mends it. Takes up to a minute. Exits with 0 "
        "if all is well, 3 if the worst is a warning, 1 if something fails, and 2 if nothing could be examined.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE|JSON|-",
        help="examine what `vllm serve --kv-transfer-config` is given, too, as `blendhub check` reads it; "
        "or, if its name ends with .toml, the configuration of a hub",
    )
    parser.add_argument("--device", metavar="NAME", help="what vLLM runs on (cuda, cpu, npu); default: any")
    parser.add_argument("--endpoint", metavar="EP", help="examine the hub that runs there, too")
    parser.add_argument("--options", metavar="JSON", help="the options of its transport, such as keys")
    parser.add_argument("--only", metavar="CHECK", action="append", help="make this check only; may be given again")
    parser.add_argument("--json", action="store_true", help="print JSON without secrets, for a request for support")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from blendhub.tools.doctor.examination import examine

    at = _circumstances(arguments)
    found = examine(at, arguments.only or ())
    if not arguments.json:
        found = _shown(found)
    findings = list(found)
    if arguments.json:
        report = {
            "blendhub": blendhub.__version__,
            "worst": worst(findings),
            "findings": without_secrets(at, findings),
        }
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return EXIT_CODES[worst(findings)]


def _circumstances(arguments: argparse.Namespace) -> Circumstances:
    from blendhub.tools.doctor.software import hub_of

    config, flag = arguments.config, None
    if config and not config.endswith(".toml"):
        try:
            flag = read_flag(config)
        except ValueError as error:
            raise OptionError(str(error)) from None
    at = Circumstances(
        host=PluginHost.discover(),
        hub=hub_of(flag) if flag is not None else load_config(Path(config) if config else None),
        config=config if config and os.path.exists(config) else "-",
        flag=flag,
        device=arguments.device,
    )
    return msgspec.structs.replace(
        at, endpoint=arguments.endpoint or at.configured_endpoint, transport=_transport(arguments, at)
    )


def _transport(arguments: argparse.Namespace, at: Circumstances) -> PluginChoice:
    """How to reach the hub that is examined."""
    configured = at.choice("transport") or PluginChoice("zmq")
    if arguments.options is None:
        return configured
    return PluginChoice(configured.name, read_object("--options", arguments.options))


def _shown(found: Iterable[Finding]) -> Iterator[Finding]:
    """Print each finding when it comes, and pass it on."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for finding in found:
        line = Text.assemble(
            (f"{finding.verdict:<5}", COLOURS[finding.verdict]), f"{finding.check:<18}{finding.sentence}"
        )
        if finding.command:
            line.append(f"\n{'':<23}mend: ", "dim").append(finding.command, "bold")
        console.print(line)
        yield finding
