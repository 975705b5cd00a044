"""Reads what commands are given as JSON: objects of options, and the value of ``vllm serve --kv-transfer-config``."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from blendhub.core.errors import BlendHubError, OptionError, reason_of


def read_flag(config: str) -> Any:
    """The flag's value, from a text, a file or standard input; raises OptionError if that is not JSON."""
    if config.lstrip().startswith(("{", "[", '"')):
        name, text = "the configuration", config
    elif config == "-":
        name, text = "standard input", sys.stdin.read()
    else:
        try:
            name, text = config, Path(config).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            expected = "give a file, JSON in braces, or -"
            raise BlendHubError(f"cannot read {config}: {reason_of(error)}; {expected}") from None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise OptionError(f"{name} is not JSON: {error}") from None


def read_object(flag: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise OptionError(f"{flag} {text!r} is not a JSON object: {error}") from None
