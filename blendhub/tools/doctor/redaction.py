"""Removes secrets from what is sent to others."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding

SECRET_NAME = re.compile(r"secret|password|passwd|credential|token$|api_?key|salt", re.IGNORECASE)
SHORTEST = 4
"""A shorter value would be struck out of words."""

USER_IN_URL = re.compile(r"//[^/\s@]+@")


def without_secrets(at: Circumstances, findings: list[Finding]) -> list[Finding]:
    """The findings without the values of options named like secrets, users in addresses, and the home directory."""
    secrets = set(_secrets([at.flag, at.transport.options, msgspec.to_builtins(at.hub)]))
    # The longest first: one may be a part of another.
    struck = sorted((one for one in secrets if len(one) >= SHORTEST), key=len, reverse=True)
    return [
        msgspec.structs.replace(
            finding, sentence=_cleaned(finding.sentence, struck), command=_cleaned(finding.command, struck)
        )
        for finding in findings
    ]


def _cleaned(text: str, struck: list[str]) -> str:
    for secret in struck:
        text = text.replace(secret, "***")
    text = USER_IN_URL.sub("//***@", text)
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)


def _secrets(given: Any, is_secret: bool = False) -> Iterator[str]:
    """The texts in a configuration under a name that says that they are secret."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            yield from _secrets(value, is_secret or bool(SECRET_NAME.search(str(name))))
    elif isinstance(given, list | tuple):
        for value in given:
            yield from _secrets(value, is_secret)
    elif is_secret and isinstance(given, str) and not os.path.exists(given):  # the name of a key's file is no secret
        yield given
