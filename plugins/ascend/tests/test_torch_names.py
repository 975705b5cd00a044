"""All names of torch that the code uses are in torch 2.10, which vllm-ascend needs; the tests run with another one.

``torch_names.json`` says what torch 2.10 lacks of the torch that it was compared with, and which names of torch's
modules it has, of which the former says nothing. Both were read from the wheel's Python and stubs.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]
RECORD = Path(__file__).with_name("torch_names.json")
CODE = ("plugins/ascend/blendhub_ascend", "plugins/selectors/blendhub_selectors", "blendhub/devices", "blendhub/vllm")
NOT_THERE = {"upstream.py"}
"""Files that are not imported beside vllm-ascend."""


def names_in(tree: ast.Module) -> Iterator[str]:
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if not re.fullmatch(r"torch(\.\w+)+", dotted):
                if hasattr(torch.Tensor, node.attr) and not node.attr.startswith("__"):
                    yield f"torch.Tensor.{node.attr}"
            elif id(node) not in inner:
                # Operators are torch_npu's and vllm-ascend's, and recorded with their schemas.
                yield "torch.ops" if dotted.startswith("torch.ops.") else dotted


def test_the_code_uses_no_name_of_torch_that_torch_2_10_lacks():
    record = json.loads(RECORD.read_text())
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py") if path.name not in NOT_THERE]
    names = {name for path in files for name in names_in(ast.parse(path.read_text()))}
    assert record["torch"] == "2.10.0" and len(names) > 50
    assert not names & set(record["lacks"])
    in_modules = {name for name in names if name.count(".") > 1 and not name.startswith("torch.Tensor.")}
    unknown = in_modules - set(record["has"])
    assert not unknown, f"look for these names in torch 2.10, and add those that it has to {RECORD.name}"
