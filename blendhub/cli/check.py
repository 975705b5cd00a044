"""``blendhub check``: what is wrong in a ``--kv-transfer-config``, before vLLM has loaded a model to find out."""

import argparse
from typing import Any

from blendhub.cli.flag_file import read_flag
from blendhub.host import PluginHost
from blendhub.vllm.transfer_config import mistakes_in_transfer_config


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="find every mistake in a --kv-transfer-config",
        description="Find every wrong key, name and value, and every plugin that is not installed, in what "
        "`vllm serve --kv-transfer-config` is to be given. Needs neither vLLM nor a GPU. Exits with 0 if nothing is "
        "wrong, and with 1 otherwise. Whether plugins can run on this machine: `blendhub plugins`.",
    )
    parser.add_argument(
        "config",
        metavar="FILE|JSON|-",
        help="a file with the JSON of the flag, or a configuration of `vllm serve` (JSON or YAML) that has the flag; "
        "or the JSON itself; or - for standard input",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="what vLLM runs on (cuda, cpu), to check that its plugin is installed"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        given = read_flag(arguments.config)
    except ValueError as error:
        mistakes: list[Exception] = [error]
    else:
        mistakes = [*mistakes_in_transfer_config(given, PluginHost.discover(), arguments.device)]
    print("\n".join(map(str, mistakes)) or "no mistakes")
    return 1 if mistakes else 0
