"""On a machine with an accelerator, from a plain checkout: all tests of its device for real, its benchmark, an engine.

``check`` writes ``NAME-check/report.json`` in ``$OUT`` or ``build``. The engine is one of a tiny model: its start-up
checks, and one request that reuses moved text.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np

from benchmarks.report import Row, row
from blendhub.contracts import Device
from blendhub.framework.hookspecs import PluginSpec
from harness.engines import Engine, deviation
from harness.engines.tiny_model import make_config, make_tiny_model

ROOT = Path(__file__).parents[1]
ROUNDING = 1e-2
"""bfloat16 computed in another order, as the norm of the difference; with one wrong position it is above 0.1."""
SETTINGS = {
    "hub": {"arena_gib": 0.25, "metrics": ""},
    "policy": {"min_donor_context": 0, "min_reused_tokens": 64},
    "audit_share": 0.0,
    "repair": "off",
    "doubt": 0,
}
"""Everything that was asked for is blended, whether it pays or not."""
SHAPE = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "torch_dtype": "bfloat16"}
TEXT_TOKENS, GAP_TOKENS = 300, 5
START_ID, BLEND_ID = "engine_start", "engine_blend"
START = "BlendHub: "
"""Begins the lines that an engine logs once it knows what it reuses."""

StartEngine = Callable[[], Any]
"""Makes the context of an engine with BlendHub."""


def check(
    name: str,
    plugin: PluginSpec[Device],
    machine: Callable[[], dict[str, Any]],
    *,
    tests_in: str | None = None,
    benchmark: Sequence[str] = (),
    engine: Callable[[], Iterable[Row]] = lambda: (),
) -> int:
    """0 only if every test passed and every bar was met. ``machine`` says what the report names, ``tests_in`` is the
    folder of the plugin, ``benchmark`` a module and its arguments; each may be left out. ``engine`` says how an engine
    of this machine starts and blends; the report is written anew with each of its rows.
    """
    unavailable = plugin.probe()
    if unavailable:
        print(f"nothing can be checked here: {unavailable.reason}; try: {unavailable.command}")
        return 2
    target = Path(os.environ.get("OUT") or ROOT / "build") / f"{name}-check"
    target.mkdir(parents=True, exist_ok=True)
    tests, rows = target / "tests.xml", target / "benchmark.json"
    for stale in (tests, rows):
        stale.unlink(missing_ok=True)
    if tests_in:
        at_once = ["-n", "12"] if find_spec("xdist") else []
        _run("pytest", f"{tests_in}/tests", f"--junitxml={tests}", *at_once)
    if benchmark:
        _run(*benchmark, "--json", str(rows))
    report = {
        **machine(),
        "details": plugin.details(),
        "tests": _counts(tests) if tests.exists() else None,
        "benchmark": json.loads(rows.read_text()) if rows.exists() else None,
        "engine": [],
    }
    missing = (tests_in and not report["tests"]) or (benchmark and not report["benchmark"])

    def write() -> None:
        report["ok"] = not missing and _is_good(report)
        (target / "report.json").write_text(json.dumps(report, indent=2) + "\n")

    write()
    for told in engine():
        print(f"{told.id}: {told.what}", "" if told.value is None else f"= {told.value:.3g}", flush=True)
        report["engine"].append(msgspec.structs.asdict(told))
        write()
    print(f"{machine()}: tests {report['tests']}; {'all is well' if report['ok'] else 'SOMETHING FELL SHORT'}")
    print(f"the report is {target / 'report.json'}")
    return 0 if report["ok"] else 1


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False)


def _counts(junit: Path) -> dict[str, int]:
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def _is_good(report: dict[str, Any]) -> bool:
    tests, benchmark = report["tests"] or {}, report["benchmark"] or {"rows": []}
    if tests.get("failures") or tests.get("errors"):
        return False
    # Rows without a bar are figures; an engine's row without a verdict says why none was started.
    barred = [row for row in benchmark["rows"] if row["bar"] is not None]
    return all(row["ok"] for row in barred) and all(row["ok"] is not False for row in report["engine"])


def rows(needed: str, start: StartEngine) -> Iterator[Row]:
    """``needed`` is the package that serves this machine's accelerator in vLLM."""
    if not find_spec(needed):
        what = f"{needed} is not installed: no engine was started"
        yield row(START_ID, what, "share", [], 1.0)
        yield row(BLEND_ID, what, "norm", [], ROUNDING, "lower")
        return
    try:
        with start() as engine:
            yield from rows_of(engine)
    except Exception as error:  # whatever an engine ends with belongs into the report
        yield _fell_short(START_ID, f"no engine with BlendHub starts, or it ended: {error}")


def rows_of(engine: Any) -> Iterator[Row]:
    """An engine whose settings let all of a text be reused; its model takes tokens below 1000."""
    random = np.random.default_rng(1)
    first, second, gap, rest = (
        random.integers(10, 990, n).tolist() for n in (TEXT_TOKENS, TEXT_TOKENS, GAP_TOKENS, GAP_TOKENS)
    )
    engine.one([*first, *second])
    yield start_row(START_ID, "start-up checks", engine.log)
    engine.forget()
    prompt = [*second, *gap, *first, *rest]
    expected = engine.full_prefill(prompt)
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    if blended.report.get("moved_tokens") != 2 * TEXT_TOKENS:
        yield _fell_short(BLEND_ID, f"text was not reused where it had moved: {blended.report}")
        return
    error = deviation(blended.kv(len(prompt) - 1), expected)
    what = "KV of moved text, all of it recomputed: its distance from a full prefill's"
    yield row(BLEND_ID, what, "norm", [error], ROUNDING, "lower")


def start_row(id: str, what: str, log: str) -> Row:
    """Whether an engine with this log passed its start-up checks, and what it said."""
    said = [line.partition(START)[2] for line in log.splitlines() if START in line]
    passed = any(line.startswith("text is reused anywhere") for line in said)
    words = "; ".join(said) or "nothing was logged about BlendHub"
    return row(id, f"{what} passed: {words}", "share", [float(passed)], 1.0)


@contextmanager
def engine_of_the_checkout(
    settings: dict[str, Any] = SETTINGS,
    environment: dict[str, str] | None = None,
    model: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Iterator[Engine]:
    """An engine that finds this checkout's packages, whether they are installed or not.

    The model is one that attention on NPUs takes, too: 16-bit floats, heads of 128 items, blocks of 128 tokens.
    ``model`` are changes to its configuration.
    """
    environment = environment or {}
    with tempfile.TemporaryDirectory() as place:
        search = [environment.get("PYTHONPATH", ""), *map(str, paths_of_the_checkout(Path(place) / "metadata"))]
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, search))}
        make = make_config if options.get("load_format") == "dummy" else make_tiny_model
        made = make(Path(place) / "model", **{**SHAPE, **model})
        options = {"dtype": "bfloat16", "block_size": 128, **options}
        with Engine(made, settings, environment=environment, **options) as engine:
            yield engine


def paths_of_the_checkout(metadata: Path) -> list[Path]:
    """What Python must search for the checkout's packages and for their entry points, which are written to a folder."""
    projects = [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
    for folder in projects:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        name, groups = project["name"], project.get("entry-points", {})
        target = metadata / f"{name.replace('-', '_')}-0.dist-info"
        target.mkdir(parents=True)
        (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        lines = [(f"[{group}]", *(f"{key} = {at}" for key, at in names.items())) for group, names in groups.items()]
        (target / "entry_points.txt").write_text("\n".join(chain.from_iterable(lines)))
    return [metadata, *projects]


def _fell_short(id: str, what: str) -> Row:
    return Row(id, what, None, "", None, "higher", False, None)
