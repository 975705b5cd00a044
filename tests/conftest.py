"""What several tests need: distributions made for one test."""

import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from blendhub import PluginHost
from harness.engines.engine import OPTIONS

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads that compute together wait for each other: beside other workers, one core each is twice as fast as all.
    _cores = sorted(os.sched_getaffinity(0))
    _worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(_cores[_worker % len(_cores)])}

# vLLM writes zeros to all of its cache; 65,536 tokens are enough for any test.
OPTIONS["num_gpu_blocks_override"] = 2048


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that no worker begins one when the others have nothing left to do.

    These have a longer timeout, or many slow tests.
    """
    weights = Counter[Path]()
    for item in items:
        weights[item.path] += bool(item.get_closest_marker("slow")) + 100 * bool(item.get_closest_marker("timeout"))
    items.sort(key=lambda item: -weights[item.path])


class Site:
    """A directory of installed distributions, on the path while a test runs: real metadata and real modules."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(self, name: str, source: str, *, version: str = "1.0", module: str = "") -> None:
        """A distribution of one module; its entry point is named like it."""
        module = module or name.replace("-", "_")
        (self.path / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[blendhub]\n{module} = {module}\n")

    def host(self) -> PluginHost:
        """A host of these distributions only, whatever else is installed."""
        return PluginHost(
            entry
            for distribution in distributions(path=[str(self.path)])
            for entry in distribution.entry_points.select(group="blendhub")
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path / "site")
    made.path.mkdir()
    monkeypatch.syspath_prepend(made.path)
    yield made
    for module in made.path.glob("*.py"):
        sys.modules.pop(module.stem, None)
