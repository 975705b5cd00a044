"""The structure of the code: imports without circles, layers, and folders within their bounds."""

import ast
import functools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from blendhub.hub.config import HubConfig, Listen, StoreChoice
from blendhub.vllm.settings import ReusePolicy, Settings
from tests import size

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "blendhub", *(folder for folder in ROOT.glob("plugins/*/blendhub_*") if folder.is_dir())]
MAX_MODULES = 15
MAX_OPTIONS = 34
MAX_ARGUMENTS = 7


def module_name(file: Path) -> str:
    root = next(package.parent for package in PACKAGES if package in file.parents)
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for package in PACKAGES for file in package.rglob("*.py")}


def imports_of(name: str) -> set[str]:
    """The modules of ours that a module imports, also inside functions, but not only for type checkers."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys() or {node.module}
    return imported & MODULES.keys() - {name}


@functools.cache
def all_imports() -> dict[str, set[str]]:
    return {name: imports_of(name) for name in MODULES}


def is_in(module: str, place: str) -> bool:
    """Whether a module is the place, or in the package of that name; ``plugins`` are all built-in plugins of an engine
    or a hub: commands run beside these, and what vllm-ascend needs of the adapter belongs to the adapter.
    """
    if place == "plugins":
        return module.startswith("blendhub_") and not module.startswith(("blendhub_tools", "blendhub_ascend.vllm"))
    return f"{module}.".startswith(f"{place}.")


def reached_from(place: str) -> set[str]:
    """All modules that are imported, directly or through others, by the modules of a place."""
    reached: set[str] = set()
    waiting = [name for name in MODULES if is_in(name, place)]
    while waiting:
        for name in all_imports()[waiting.pop()] - reached:
            reached.add(name)
            waiting.append(name)
    return reached


def test_imports_have_no_circles():
    try:
        list(TopologicalSorter(all_imports()).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def room_of(name: str, house: str) -> str:
    """The room of a house that a module is in; a module beside the rooms counts as a room."""
    return ".".join(name.split(".")[: house.count(".") + 2])


HOUSES = sorted(
    {name.rpartition(".")[0] for name, file in MODULES.items() if file.name == "__init__.py" and "." in name}
)
"""The packages that have rooms."""


@pytest.mark.parametrize("house", HOUSES)
def test_rooms_import_each_other_without_circles(house):
    rooms: dict[str, set[str]] = {}
    for name in MODULES:
        if is_in(name, house):
            room = room_of(name, house)
            used = {room_of(used, house) for used in all_imports()[name] if is_in(used, house)}
            rooms.setdefault(room, set()).update(used - {room})
    rooms.pop(house, None)  # what a package exports
    try:
        list(TopologicalSorter(rooms).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("house", ["blendhub.hub", "blendhub.vllm"])
def test_rooms_hold_about_a_dozen_modules_and_say_what_belongs_there(house):
    folders = {file.parent for name, file in MODULES.items() if is_in(name, house)}
    for folder in folders:
        assert len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) <= MAX_MODULES
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        assert len(docstring.split()) >= 12, f"{folder} should say what lives there and what may not"


def test_contracts_import_only_the_vocabulary():
    direct = {name for module in MODULES if is_in(module, "blendhub.contracts") for name in all_imports()[module]}
    assert {
        name for name in direct if not is_in(name, "blendhub.contracts") and not is_in(name, "blendhub.core")
    } == set()


@pytest.mark.parametrize(
    "importer, forbidden",
    [
        ("blendhub.cli", "plugins"),
        ("blendhub.cli", "blendhub_tools"),
        ("blendhub.core", "blendhub.system"),
        ("blendhub.core", "blendhub.framework"),
        ("blendhub.framework", "blendhub.client"),
        ("blendhub.client", "blendhub.hub"),
        ("blendhub.vllm.messages", "blendhub.vllm.worker"),
        ("blendhub.vllm.scheduler", "blendhub.vllm.worker"),
        ("blendhub.vllm.worker", "blendhub.vllm.scheduler"),
        ("blendhub.hub", "blendhub.vllm"),
        ("blendhub.hub", "blendhub.cli"),
        ("blendhub_tools.analysis", "blendhub.vllm"),
        ("plugins", "blendhub.hub"),
        ("plugins", "blendhub.vllm"),
    ],
)
def test_layers_do_not_reach_upwards(importer, forbidden):
    assert not {name for name in reached_from(importer) if is_in(name, forbidden)}


def test_nothing_imports_the_adapter_but_the_commands_that_check_its_settings():
    outside = {name for name in MODULES if not is_in(name, "blendhub.vllm")}
    importers = {name for name in outside if any(is_in(used, "blendhub.vllm") for used in all_imports()[name])}
    assert importers <= {
        "blendhub.cli.checks.configuration",
        "blendhub.cli.checks.subject",
        "blendhub_tools.advise",
        "blendhub_ascend.vllm.connector",
        "blendhub_ascend.vllm.platform",
        "blendhub_ascend.vllm.refusals",
    }


def test_no_plugin_imports_what_measures_it():
    importers = [
        file
        for file in ROOT.glob("plugins/**/*.py")
        if re.search(r"^(from|import) benchmarks\b", file.read_text(), re.M)
    ]
    assert importers == []


def test_the_engine_and_the_hub_have_few_options():
    structs = (Settings, ReusePolicy, HubConfig, Listen, StoreChoice)
    assert sum(len(struct.__struct_fields__) for struct in structs) <= MAX_OPTIONS


def test_no_folder_grows_beyond_its_bound():
    """A commit that adds more raises the bound in ``tests/size.py``, and its message says why."""
    n_lines = {row: size.lines(files) for row, files in size.rows().items()}
    assert {row: n for row, n in n_lines.items() if n > size.BOUNDS[row]} == {}


def constructors() -> Iterator[tuple[str, int]]:
    """The number of arguments that each class needs; of a record, those that have no default and are given by position.

    Records whose fields are given by name read as the tables that they are.
    """
    for file in MODULES.values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
            if made:
                yield node.name, len([*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]) - 1
                continue
            kinds = ast.unparse(ast.Module([*map(ast.Expr, [*node.bases, *node.decorator_list])], []))
            if re.search("Struct|NamedTuple|dataclass", kinds) and not re.search("kw_only=True", ast.unparse(node)):
                yield node.name, sum(isinstance(one, ast.AnnAssign) and one.value is None for one in node.body)


def test_no_conflict_of_a_merge_is_left():
    found = subprocess.run(["git", "grep", "-nE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True)
    assert not found.stdout


def test_no_constructor_takes_more_than_seven_arguments():
    """vLLM's own signatures excepted; they are no constructors."""
    assert {name: n for name, n in constructors() if n > MAX_ARGUMENTS} == {}


def test_mypy_checks_each_plugin_and_its_tests():
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["packages"]
    plugins = {file.parent for file in ROOT.glob("plugins/*/pyproject.toml")}
    assert {
        package for plugin in plugins for package in (f"plugins.{plugin.name}.tests", f"blendhub_{plugin.name}")
    } <= {*checked}
