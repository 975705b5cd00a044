"""``blendhub check``: what is wrong in a ``--kv-transfer-config``, before vLLM has loaded a model to find out."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendhub.errors import BlendHubError
from blendhub.host import PluginHost
from blendhub.vllm.transfer_config import FLAG, mistakes_in_transfer_config

KEYS = (FLAG, FLAG.replace("-", "_"))


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
        given = _flag_in(_read(arguments.config))
    except ValueError as error:
        mistakes = [str(error)]
    else:
        mistakes = mistakes_in_transfer_config(given, PluginHost.discover(), arguments.device)
    print("\n".join(mistakes) or "no mistakes")
    return 1 if mistakes else 0


def _read(config: str) -> Any:
    """What the text says; raises ValueError if it is no JSON, or no YAML in a file of that name."""
    if config.lstrip().startswith(("{", "[", '"')):
        return _from_json("the configuration", config)
    if config == "-":
        return _from_json("standard input", sys.stdin.read())
    try:
        text = Path(config).read_text(encoding="utf-8")
    except OSError as error:
        raise BlendHubError(f"cannot read {config}: {error.strerror}; give a file, JSON in braces, or -") from error
    return _from_yaml(config, text) if config.endswith((".yaml", ".yml")) else _from_json(config, text)


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _from_yaml(name: str, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise BlendHubError(f"reading {name} needs PyYAML, which comes with vLLM: pip install pyyaml") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def _flag_in(given: Any) -> Any:
    """The flag's value, if this is a configuration of the whole server."""
    for key in KEYS:
        if isinstance(given, Mapping) and key in given:
            value = given[key]
            return _from_json(key, value) if isinstance(value, str) else value
    return given
