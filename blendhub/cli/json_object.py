"""Reads options that are given as JSON."""

from typing import Any

import msgspec

from blendhub.core.errors import OptionError


def read_object(flag: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise OptionError(f"{flag} {text!r} is not a JSON object: {error}") from None
