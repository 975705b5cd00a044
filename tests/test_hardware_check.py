"""What `make gpu-check` and `make npu-check` say about an engine of the machine."""

from importlib.metadata import distributions, entry_points
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from benchmarks import hardware_check

ROWS = [{"ok": True, "bar": 0.9}, {"ok": None, "bar": None}]
GOOD: dict[str, Any] = {"tests": {"failures": 0, "errors": 0}, "benchmark": {"rows": ROWS}}
"""A figure without a bar needs no verdict."""


def died():
    raise RuntimeError("the engine died: error 507899")


@pytest.mark.parametrize(
    "needed, n_rows, ok, words",
    [
        ("vllm_of_nobody", 2, None, "vllm_of_nobody is not installed: no engine was started"),
        ("json", 1, False, "error 507899"),
    ],
)
def test_rows_say_why_no_engine_was_started_and_one_that_died_makes_the_report_bad(needed, n_rows, ok, words):
    rows = [*hardware_check.rows(needed, died)]
    assert [row.ok for row in rows] == [ok] * n_rows and all(words in row.what for row in rows)
    report = GOOD | {"engine": [{"ok": row.ok} for row in rows]}
    assert hardware_check._is_good(report) == (ok is None)
    for verdict, bar in ((None, 0.9), (False, 0.9)):
        assert not hardware_check._is_good(report | {"benchmark": {"rows": [{"ok": verdict, "bar": bar}]}})


def test_an_engine_that_reuses_exact_prefixes_only_falls_short():
    log = "INFO BlendHub: exact prefixes are reused; embedded hub; arena 1 GiB\n"
    answer = SimpleNamespace(report={"moved_tokens": 0, "reason": "keys of this model cannot be moved"})
    engine = mock.Mock(log=log, one=mock.Mock(return_value=answer))
    start, blend = hardware_check.rows_of(engine)
    assert start.ok is False and "exact prefixes are reused" in start.what
    assert blend.ok is False and "keys of this model cannot be moved" in blend.what


@pytest.mark.parametrize("group", ["blendhub", "vllm.general_plugins"])
def test_a_checkout_that_is_not_installed_has_the_entry_points_of_its_packages(tmp_path, group):
    metadata, *packages = hardware_check.paths_of_the_checkout(tmp_path / "metadata")
    written = {
        (one.name, one.value)
        for made in distributions(path=[str(metadata)])
        for one in made.entry_points.select(group=group)
    }
    installed = {(one.name, one.value) for one in entry_points(group=group) if one.value.startswith("blendhub")}
    assert written == installed
    assert all((path / "pyproject.toml").exists() for path in packages)
