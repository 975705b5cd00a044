"""Records what torch 2.10, which vllm-ascend needs, lacks of the torch that the tests run with.

    pip download torch==2.10.0 --no-deps --only-binary=:all: --platform macosx_11_0_arm64 --python-version 3.11
    python plugins/ascend/record_torch_names.py torch-2.10.0-*.whl

writes ``tests/torch_names.json``. The wheel may be for any system: nothing of it is run, and its Python and its stubs
name what the compiled part offers. A test fails when the code uses a name that torch 2.10 lacks.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
TARGET = Path(__file__).parent / "tests" / "torch_names.json"
CODE = ("plugins/ascend/blendhub_ascend", "plugins/selectors/blendhub_selectors", "blendhub/devices", "blendhub/vllm")
NOT_THERE = {"upstream.py"}
"""Files that are not imported beside vllm-ascend."""
COMPILED = {"torch": ("torch/_C/__init__.pyi", "torch/_C/_VariableFunctions.pyi")}
TENSOR = {"torch/_tensor.py": "Tensor", "torch/_C/__init__.pyi": "TensorBase"}
"""The classes that have the attributes of a tensor, and their files."""


def used() -> set[str]:
    """Dotted names from ``torch`` on, and ``torch.Tensor.NAME`` for each attribute that a tensor has here."""
    found = set()
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in NOT_THERE:
                found |= set(_names_in(ast.parse(path.read_text())))
    return found


def _names_in(tree: ast.Module) -> Iterator[str]:
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


class Wheel:
    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._files = set(self._archive.namelist())

    def has(self, dotted: str) -> bool:
        owner, _, name = dotted.rpartition(".")
        if owner == "torch.Tensor":
            return any(name in self._members(path, of) for path, of in TENSOR.items())
        if not owner or self._is_module(dotted):
            return self._is_module(dotted)
        # Of what is no module, such as a class, its own name must do.
        return name in self._names(owner) if self._is_module(owner) else self.has(owner)

    def _is_module(self, dotted: str) -> bool:
        return any(path in self._files for path in _paths(dotted))

    @cache  # noqa: B019  (there is one wheel)
    def _names(self, module: str) -> frozenset[str]:
        found: set[str] = set()
        for path in (*_paths(module), *COMPILED.get(module, ())):
            for node in ast.walk(self._tree(path)):
                if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                    starred = ".".join([module, node.module]) if node.level and node.module else node.module
                    if starred and starred != module:
                        found |= self._names(starred)
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    found |= {alias.asname or alias.name for alias in node.names}
                elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
        return frozenset(found)

    def _members(self, path: str, owner: str) -> set[str]:
        found = set()
        for node in self._tree(path).body:
            if isinstance(node, ast.ClassDef) and node.name == owner:
                for one in ast.walk(node):
                    if isinstance(one, ast.FunctionDef):
                        found.add(one.name)
                    elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                        found.add(one.id)
        return found

    @cache  # noqa: B019
    def _tree(self, path: str) -> ast.Module:
        return ast.parse(self._archive.read(path) if path in self._files else b"")


def _paths(module: str) -> list[str]:
    place = module.replace(".", "/")
    return [f"{place}.py", f"{place}.pyi", f"{place}/__init__.py", f"{place}/__init__.pyi"]


def main(path: str) -> int:
    wheel, names = Wheel(Path(path)), used()
    missing = sorted(name for name in names if not wheel.has(name))
    if missing:
        print(f"{path} lacks what the code uses: {', '.join(missing)}")
        return 1
    here = {f"torch.{name}" for name in dir(torch)} | {f"torch.Tensor.{name}" for name in dir(torch.Tensor)}
    record = {
        "torch": Path(path).name.split("-")[1],
        "compared_with": torch.__version__,
        "lacks": sorted(name for name in here if not wheel.has(name) and not name.rpartition(".")[2].startswith("_")),
        "has": sorted(name for name in names if is_deep(name)),
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {TARGET}; torch {record['torch']} has all {len(names)} names that the code uses")
    return 0


def is_deep(name: str) -> bool:
    """Whether the name stands in a module of torch's, of which ``lacks`` says nothing."""
    return name.count(".") > 1 and not name.startswith("torch.Tensor.")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
