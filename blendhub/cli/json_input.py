"""Reads what commands are given as JSON: objects of options, and the value of ``vllm serve --kv-transfer-config``."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from blendhub.core.errors import BlendHubError, OptionError
from blendhub.vllm.transfer_config import FLAG

KEYS = (FLAG, FLAG.replace("-", "_"))


def read_flag(config: str) -> Any:
    """The flag's value; raises ValueError if what holds it cannot be understood."""
    return _flag_in(_read(config))


def _read(config: str) -> Any:
    """The value that the text holds; raises ValueError if it is no JSON, or no YAML in a file of that name."""
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
        # Without the lines around the mistake, which may hold secrets of the server.
        where = getattr(error, "problem_mark", None)
        place = f" in line {where.line + 1}, column {where.column + 1}" if where else ""
        raise ValueError(
            f"{name} is not YAML: {getattr(error, 'problem', None) or 'it cannot be read'}{place}"
        ) from None


def _flag_in(given: Any) -> Any:
    """The flag's value, if this is a configuration of the whole server."""
    for key in KEYS:
        if isinstance(given, Mapping) and key in given:
            value = given[key]
            return _from_json(key, value) if isinstance(value, str) else value
    return given


def read_object(flag: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise OptionError(f"{flag} {text!r} is not a JSON object: {error}") from None
