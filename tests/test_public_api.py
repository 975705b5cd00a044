"""What plugins import of BlendHub is what docs/plugins.md says that they may."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.public_api import PUBLIC, is_public, names_in

ROOT = Path(__file__).parent.parent
PLUGINS = [
    *(file for file in ROOT.glob("plugins/*/blendhub_*/**/*.py")),
    *(file for file in ROOT.glob("examples/plugin-template/**/*.py")),
]
PARTS_OF_BLENDHUB = {
    "plugins/tools/blendhub_tools/": (
        "blendhub.cli",
        "blendhub.core.provenance",
        "blendhub.hub",
        "blendhub.outcome",
        "blendhub.system",
        "blendhub.vllm",
    ),
    "plugins/ascend/blendhub_ascend/vllm/": ("blendhub.vllm",),
}
"""What changes with BlendHub, and the rooms that it also imports from: commands, and what adapts vllm-ascend."""


def imports_of(file: Path) -> Iterator[tuple[str, str]]:
    """The modules of BlendHub that a file imports from, each with a name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.rpartition(".")[::2] for alias in node.names if "." in alias.name)


def test_plugins_and_the_template_import_public_names_only():
    pytest.importorskip("torch", reason="what devices may import needs torch; `make setup` installs it")
    private = set()
    for file in PLUGINS:
        path = file.relative_to(ROOT).as_posix()
        part = next((part for part in PARTS_OF_BLENDHUB if path.startswith(part)), path)
        for module, name in imports_of(file):
            if f"{module}.".startswith("blendhub.") and not is_public(module, name):
                room = next((room for room in PARTS_OF_BLENDHUB.get(part, ()) if module.startswith(room)), None)
                private.add((part, room or f"{module}.{name}"))
    assert private == {(part, room) for part, rooms in PARTS_OF_BLENDHUB.items() for room in rooms}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_there(module):
    if module.startswith(("blendhub.devices", "blendhub.testing")):
        pytest.importorskip("torch", reason="devices and their suite need torch; `make setup` installs it")
    names = names_in(module)
    assert names and all(hasattr(import_module(module), name) for name in names)
