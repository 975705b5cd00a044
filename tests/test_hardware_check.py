"""What `make gpu-check` and `make npu-check` say about an engine of the machine."""

from importlib.metadata import distributions, entry_points
from typing import Any

import pytest

from benchmarks import engine_check, hardware_check

GOOD: dict[str, Any] = {"tests": {"failures": 0, "errors": 0}, "benchmark": {"rows": [{"ok": True, "bar": 0.9}]}}


def rows(needed, start=None):
    return [{"id": row.id, "ok": row.ok, "what": row.what} for row in engine_check.rows(needed, start)]


def test_without_vllm_for_the_accelerator_rows_say_that_no_engine_was_started():
    found = rows("vllm_of_nobody")
    assert [(row["id"], row["ok"]) for row in found] == [("engine_start", None), ("engine_blend", None)]
    assert all(row["what"] == "vllm_of_nobody is not installed: no engine was started" for row in found)
    assert hardware_check._is_good({**GOOD, "engine": found})


def test_an_engine_that_does_not_start_makes_the_report_bad():
    def fail():
        raise RuntimeError("the engine died: error 507899")

    (row,) = rows("json", fail)
    assert row["ok"] is False and "error 507899" in row["what"]
    assert not hardware_check._is_good({**GOOD, "engine": [row]})


@pytest.mark.parametrize("row, is_good", [((None, None), True), ((None, 0.9), False), ((False, 0.9), False)])
def test_a_figure_without_a_bar_needs_no_verdict(row, is_good):
    ok, bar = row
    rows = [*GOOD["benchmark"]["rows"], {"ok": ok, "bar": bar}]
    assert hardware_check._is_good({**GOOD, "benchmark": {"rows": rows}, "engine": []}) == is_good


class Engine:
    """One that starts, but reuses no text that has moved."""

    log = "INFO BlendHub: exact prefixes are reused; embedded hub; arena 1 GiB\n"

    def one(self, prompt, **asked):
        return self

    report = {"moved_tokens": 0, "reason": "keys of this model cannot be moved"}  # noqa: RUF012

    def forget(self):
        pass

    def full_prefill(self, prompt):
        pass


def test_an_engine_that_reuses_exact_prefixes_only_falls_short():
    start, blend = engine_check.rows_of(Engine())
    assert start.ok is False and "exact prefixes are reused" in start.what
    assert blend.ok is False and "keys of this model cannot be moved" in blend.what


@pytest.mark.parametrize("group", ["blendhub", "vllm.general_plugins"])
def test_a_checkout_that_is_not_installed_has_the_entry_points_of_its_packages(tmp_path, group):
    metadata, *packages = engine_check.paths_of_the_checkout(tmp_path / "metadata")
    written = {
        (one.name, one.value)
        for made in distributions(path=[str(metadata)])
        for one in made.entry_points.select(group=group)
    }
    installed = {(one.name, one.value) for one in entry_points(group=group) if one.value.startswith("blendhub")}
    assert written == installed
    assert all((path / "pyproject.toml").exists() for path in packages)
