"""The documents say what the code does: signatures, options, dependencies, links and examples are compared."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from blendhub import PluginHost, hookspecs
from blendhub.testing import SUITES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*/*/README.md"))]
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if hasattr(hook, f"{hookspecs.PROJECT}_spec")}


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def ids_of(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_signature(hook):
    signature = re.sub(r"[\w.]+\.", "", f"{hook}{inspect.signature(HOOKS[hook])}")
    assert f"## `{signature}`" in read(DOCS / "hooks.md")


def test_no_hook_is_documented_that_does_not_exist():
    assert set(re.findall(r"^## `(\w+)\(", read(DOCS / "hooks.md"), re.M)) == set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_implemented_by_something_built_in(hook):
    implemented = [read(file) for file in ROOT.glob("plugins/*/*/__init__.py")]
    assert any(re.search(rf"@hookimpl\s+def {hook}\(", source) for source in implemented)


@pytest.mark.parametrize("struct", [hookspecs.PluginSpec, hookspecs.Unavailable], ids=lambda struct: struct.__name__)
def test_the_fields_of_specs_are_documented(struct):
    section = read(DOCS / "hooks.md").split(f"### {struct.__name__}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| (required|optional) \|", section, re.M)
    fields = [(field.name, "required" if field.required else "optional") for field in msgspec.structs.fields(struct)]
    assert rows == fields


def test_the_api_version_is_documented():
    assert f"The API version is {hookspecs.API_VERSION}." in read(DOCS / "hooks.md")


def sections_of_options() -> dict[str, str]:
    """What options.md must say about each built-in plugin."""
    ours = {tomllib.loads(read(project))["project"]["name"] for project in PROJECTS}
    sections = {}
    for plugin in PluginHost.discover().plugins():
        if plugin.distribution in ours and plugin.kind:
            rows = [
                f"| `{option['name']}` | {option['type']}{_bounds(option['bounds'])} | `{option['default']!r}` "
                f"| {option['description']} |"
                for option in plugin.options
            ]
            table = ["| option | type | default | meaning |", "|---|---|---|---|", *rows]
            sections[f"{plugin.kind} {plugin.name}"] = "\n".join(table) if rows else "It has no options."
    return sections


def _bounds(bounds: dict) -> str:
    return "".join(f", {name} {limit}" for name, limit in bounds.items())


def test_the_options_of_every_built_in_plugin_are_documented():
    documented = {}
    for section in read(DOCS / "options.md").split("\n## `")[1:]:
        title, text = section.split("`\n", 1)
        documented[title] = text.strip()
    expected = sections_of_options()
    assert set(documented) == set(expected)
    for title, text in expected.items():
        assert documented[title].endswith(text), f"docs/options.md should say of `{title}`:\n\n{text}\n"


def test_every_dependency_is_documented():
    named = set()
    for project in PROJECTS:
        told = tomllib.loads(read(project))
        groups = [told["project"].get("dependencies", []), *told["project"].get("optional-dependencies", {}).values()]
        groups += [*told.get("dependency-groups", {}).values(), told["build-system"]["requires"]]
        named |= {re.match(r"[\w-]+", wanted).group() for group in groups for wanted in group}
    ours = {tomllib.loads(read(project))["project"]["name"] for project in PROJECTS}
    assert set(re.findall(r"^\| `([\w-]+)` \|", read(DOCS / "dependencies.md"), re.M)) == named - ours


def test_every_kind_with_a_suite_is_documented():
    text = read(DOCS / "conformance.md")
    for kind, suite in SUITES.items():
        assert f"`{kind}`" in text and suite.__name__ in text


@pytest.mark.parametrize("page", PAGES, ids=ids_of(PAGES))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", read(page)):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


@pytest.mark.parametrize("page", PAGES, ids=ids_of(PAGES))
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.M))
    assert set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", read(page), re.M)) <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }


EXAMPLES = [(page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", read(page), re.S)]


@pytest.mark.parametrize("page, code", EXAMPLES, ids=ids_of([page for page, _ in EXAMPLES]))
def test_examples_run(page, code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"{page.name}:\n{code}\n{done.stderr}"
