"""The documents say what the code does: signatures, options, dependencies, links and examples are compared."""

import ast
import importlib
import inspect
import json
import operator
import re
import subprocess
import sys
import tomllib
from itertools import dropwhile, takewhile
from pathlib import Path

import msgspec
import pytest

from blendhub import PluginHost
from blendhub.cli.check import CHECKS, EXIT_CODES
from blendhub.framework import hookspecs
from blendhub.framework.builtin_plugins import HOMES, install_command
from blendhub.outcome.fates import COLOURS, Fate
from blendhub.outcome.reasons import Why
from blendhub.vllm.settings import RequestSettings, read_request, read_settings
from blendhub.vllm.transfer_config import check_transfer_config
from tests import tables

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*/*/README.md"))]
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if hasattr(hook, f"{hookspecs.PROJECT}_spec")}


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_the_hooks_are_documented_with_their_signatures():
    signatures = {re.sub(r"[\w.]+\.", "", f"{name}{inspect.signature(hook)}") for name, hook in HOOKS.items()}
    assert set(re.findall(r"^- `(\w+\(.*?)`", read(DOCS / "plugins.md"), re.M)) == signatures
    assert f"The API version is {hookspecs.API_VERSION}." in read(DOCS / "plugins.md")


@pytest.mark.parametrize("page", tables.pages())
def test_the_tables_that_follow_from_the_code_are_those_of_make_tables(page):
    assert read(DOCS / page) == tables.generated(page)


def test_every_dependency_is_documented():
    named = set()
    for project in PROJECTS:
        parsed = tomllib.loads(read(project))
        groups = [
            parsed["project"].get("dependencies", []),
            *parsed["project"].get("optional-dependencies", {}).values(),
        ]
        groups += [*parsed.get("dependency-groups", {}).values(), parsed["build-system"]["requires"]]
        named |= {re.match(r"[\w-]+", wanted).group() for group in groups for wanted in group}
    # Of packages that are parts of one file, the first stands for all.
    named = {re.sub(r"-part\d+$", "-part1", name) for name in named}
    ours = {tomllib.loads(read(project))["project"]["name"] for project in PROJECTS}
    rows = table_under("## Dependencies", "testing.md")
    assert sorted(name for row in rows for name in re.findall("`(.*?)`", row.split("|")[1])) == sorted(named - ours)


@pytest.mark.parametrize("device", [name for kind, name in HOMES if kind == "device"])
def test_the_readme_says_what_to_install_for_every_device(device):
    extra = HOMES["device", device]
    assert install_command("device", device) == f"pip install 'blendhub[{extra}]'"
    assert f"[{extra}]" in read(ROOT / "README.md")
    assert f"`{install_command('device', device)}" in read(DOCS / "vllm.md")


NEEDS_VLLM = "what it compares with needs vLLM; `make setup` installs it"


def table_under(heading: str, page: str) -> list[str]:
    """The rows of the first table of a page's section, after its own two lines."""
    section = read(DOCS / page).split(f"\n{heading}\n")[1].split("\n#")[0]
    lines = dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    return list(takewhile(lambda line: line.startswith("|"), lines))[2:]


def test_every_field_of_the_report_is_documented():
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from blendhub.core.layout import Variant
    from blendhub.core.provenance import Provenance
    from blendhub.core.spans import Span
    from blendhub.outcome.report import AuditOutcome, DoubtOutcome, RepairOutcome
    from blendhub.vllm.decision import Refusal
    from blendhub.vllm.scheduler.outcomes import outcome_of
    from blendhub.vllm.scheduler.request.served_request import ServedRequest
    from blendhub.vllm.scheduler.request.terms import Terms

    request = Request("r", [1], SamplingParams(max_tokens=1), None)
    served = ServedRequest(request, Terms(Variant(), "off", 0.0, stores=False), 16)
    served.reuse.refuse(Refusal(Why.OFF, "mode is off"))
    served.kv.came(Span(0, 1), Provenance("blended"))
    served.repair.audit, served.repair.outcome = AuditOutcome(agrees=True, kl=0.0), RepairOutcome(9, 1)
    served.repair.doubt = DoubtOutcome()
    report = msgspec.structs.replace(outcome_of(served), ratio=0.3).response(explains=False)
    documented = [row.split("`")[1] for row in table_under("## The report in the response", "reports.md")]
    assert documented == list(report)
    (example,) = (one for one in json_examples(read(DOCS / "reports.md")) if "blendhub" in one)
    assert list(example["blendhub"]) == [name for name in report if name not in ("reason", "audit", "repair", "doubt")]


def json_examples(text: str) -> list[dict]:
    return [json.loads(one) for one in re.findall(r"```json\n(.*?)```", text, re.S)]


def test_every_reason_for_refusing_a_request_is_documented():
    codes = {"model"}  # counted where there is no request to look at
    for file in (ROOT / "blendhub" / "vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(read(file))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refusal":
                codes |= {Why[name] for name in re.findall(r"Why\.([A-Z_]+)", ast.unparse(node.args[0]))}
    section = read(DOCS / "reports.md").split("\n| reason | why it was computed |")[1].split("\n\n")[0]
    assert codes <= set(re.findall(r"^\| `(\w+)` \|", section, re.M))


def test_what_the_documents_say_to_write_is_understood():
    host, text = PluginHost.discover(), "".join(map(read, DOCS.glob("*.md")))
    flags = [json.loads(flag) for flag in re.findall(r"--kv-transfer-config '(.*?)'\n", text, re.S)]
    bodies = [json.loads(body) for body in re.findall(r" -d '(.*?)'\n", text, re.S)]
    (script,) = re.findall(r"```py\n(.*?)```", text, re.S)
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.keyword) and node.arg == "kv_transfer_config":
            flags.append(ast.literal_eval(node.value))
        if isinstance(node, ast.keyword) and node.arg == "extra_args":
            bodies.append(ast.literal_eval(node.value))
    assert len(flags) == 7 and len(bodies) == 2
    several = [one for one in json_examples(text) if one.get("kv_connector") == "MultiConnector"]
    assert len(several) == 1 and {one["kv_load_failure_policy"] for one in several} == {"recompute"}
    flags += [one["kv_connector_extra_config"]["connectors"][0] for one in several]
    for flag in flags:
        check_transfer_config(flag, host, "cpu")
        read_settings(flag.get("kv_connector_extra_config", {}), host, "cpu")
    for body in bodies:
        assert read_request(body["kv_transfer_params"]) != RequestSettings()


def test_links_lead_somewhere_and_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.M))
    for page in PAGES:
        text = read(page)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: no {target}"
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M)) <= targets, page.name


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", read(page), flags=re.S), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in found}


def test_links_from_beside_the_documentation_name_headings_that_exist():
    """Within docs/, mkdocs checks them."""
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([\w./-]+\.md)#([\w-]+)\)", read(page)):
            assert anchor in headings(page.parent / target), f"{page.name}: {target} has no #{anchor}"


def test_code_names_pages_that_exist():
    folders = [
        place for place in ROOT.iterdir() if place.is_dir() and place.name not in ("build", "dist", ".venv", ".git")
    ]
    files = [
        file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".toml", ".yaml", ".json")
    ]
    assert len(files) > 100
    for file in [*files, ROOT / "Makefile", ROOT / "CHANGELOG.md", ROOT / "deploy" / "Dockerfile"]:
        for page in re.findall(r"\bdocs/[\w-]+\.(?:md|svg|png)", read(file)):
            assert (ROOT / page).exists(), f"{file}: there is no {page}"


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"])
def test_what_the_first_sentences_promise_was_measured(page):
    measured = {*map(float, re.findall(r"(?<![\w.])\d*\.\d+", read(DOCS / "measurements.md")))}
    promised = {*map(float, re.findall(r"\d\.\d+", read(page).partition("\n![")[0]))}
    assert promised and promised <= measured


def test_the_installation_says_what_it_does_and_the_readme_how_large_it_is():
    command = ["make", "--dry-run", "--always-make", "setup"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said = re.findall(r'echo "(setup.*)"', done.stdout)
    assert [line.partition(":")[0] for line in said] == ["setup", *(f"setup {step} of 4" for step in range(1, 5))]
    (size,) = re.findall(r"[\d.]+ GB on disk", said[0])
    assert f"into `.venv`, {size}" in " ".join(read(ROOT / "README.md").split())


@pytest.mark.slow
def test_the_site_has_every_page_and_no_link_or_anchor_that_leads_nowhere(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs-material builds the site; `make setup` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in (tmp_path / "site").glob("*.html")}
    assert "fonts.googleapis.com" not in (tmp_path / "site" / "index.html").read_text()


EXAMPLES = [(page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", read(page), re.S)]


@pytest.mark.slow
@pytest.mark.parametrize("page, code", EXAMPLES, ids=[page.stem for page, _ in EXAMPLES])
def test_examples_run(page, code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"{page.name}:\n{code}\n{done.stderr}"


def test_every_check_and_exit_code_of_blendhub_check_is_documented():
    assert [row.split("`")[1] for row in table_under("### `blendhub check`", "settings.md")] == list(CHECKS)
    codes = re.findall(r"^\| (\d) \|", read(DOCS / "settings.md"), re.M)
    assert {int(code) for code in codes} == {*EXIT_CODES.values(), 2}


def test_the_picture_of_strips_has_every_colour_and_word():
    picture = read(DOCS / "explain.svg")
    assert all(COLOURS[fate] in picture and fate.label in picture for fate in Fate)


def test_the_eighteen_functions_on_a_request_s_way_exist():
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w/]+)\.py` \|", read(DOCS / "how-it-works.md"), re.M)
    assert len(rows) == 18
    for function, file in rows:
        room = "blendhub" if file.startswith(("client/", "hub/")) else "blendhub.vllm"
        module = importlib.import_module(f"{room}.{file.replace('/', '.')}")
        assert callable(operator.attrgetter(function)(module)), function
