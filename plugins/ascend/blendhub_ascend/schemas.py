"""Operators as torch_npu and vllm-ascend declare them; schemas.json is what record_schemas.py found in their wheels."""

import json
from pathlib import Path
from typing import Any

import torch

_RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text())
SCHEMAS: dict[str, str] = _RECORD["schemas"]
VERSIONS: dict[str, str] = _RECORD["versions"]
NAMES: list[str] = _RECORD["names"]
"""The names of ``torch_npu.npu`` that the runtime uses."""


def problem_with(operator: str) -> str | None:
    """Why the running torch does not have the operator as it was recorded; None if it has."""
    namespace, name = operator.split("::")
    try:
        running = str(getattr(getattr(torch.ops, namespace), name).default._schema)
    except AttributeError:
        return f"{operator} is not loaded here"
    recorded = str(torch._C.parse_schema(SCHEMAS[operator]))
    if running != recorded:
        return f"{operator} has another schema here, {running}, than the recorded {recorded}"
    return None
