"""``blendhub check``: reports mistakes in a ``--kv-transfer-config`` before vLLM has to load a model to find them."""

import argparse
from typing import Any

from blendhub.cli.json_input import read_flag
from blendhub.core.errors import PluginError
from blendhub.framework.host import PluginHost
from blendhub.framework.options import parse_options
from blendhub.vllm.scheduler.startup import ROOMY, finds_prefixes, why_none_is_stored
from blendhub.vllm.settings import EXTRA, KEY, OWNER, Settings
from blendhub.vllm.transfer_config import mistakes_in_transfer_config


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="find every mistake in a --kv-transfer-config",
        description="Find every wrong key, name and value, and every plugin that is not installed, in what "
        "`vllm serve --kv-transfer-config` is to be given. Needs neither vLLM nor a GPU. Exits with 0 if nothing is "
        "wrong, and with 1 otherwise. If nothing is, it says whether blended KV is stored, and why not. Whether "
        "plugins can run on this machine: `blendhub plugins`.",
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
    host = PluginHost.discover()
    try:
        given = read_flag(arguments.config)
    except ValueError as error:
        mistakes: list[Exception] = [error]
    else:
        mistakes = [*mistakes_in_transfer_config(given, host, arguments.device)]
    if mistakes:
        print("\n".join(map(str, mistakes)))
        return 1
    print("no mistakes")
    print(_what_becomes_of_blended(given, host))
    return 0


def _what_becomes_of_blended(given: Any, host: PluginHost) -> str:
    settings = parse_options(OWNER, Settings, given.get(EXTRA, {}).get(KEY))
    try:
        why = why_none_is_stored(settings, given["kv_role"], finds_prefixes(host, settings))
    except PluginError as error:
        return f"whether blended KV is stored is not known: {error}"
    if why:
        return f"blended KV is not stored: {why}"
    if settings.store_blended:
        return "blended KV is stored, too"
    return f"blended KV is stored, too, if the arena holds {ROOMY} prompts of max_model_len: vLLM's log says whether"
