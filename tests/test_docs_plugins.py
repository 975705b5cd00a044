"""The whole selectors that docs/plugins.md shows keep the contract."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from blendhub import Span
from blendhub.contracts import Selection, checked_picks

PAGE = Path(__file__).parent.parent / "docs" / "plugins.md"
MOVED = [Span(10, 20), Span(20, 30), Span(40, 50)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, expected",
    [
        ("beginnings", [Span(10, 15), Span(20, 25), Span(40, 45)]),
        ("most_changed", [Span(25, 30), Span(40, 50)]),
    ],
)
def test_a_whole_selector_of_the_page_passes_conformance(site, name, expected):
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (code,) = [code for code in examples if f'PluginSpec(name="{name}"' in code]
    site.install("short-one", code)
    selector = site.host().create("selector", name)
    scores = np.arange(50, dtype=np.float32) if selector.probe_layer else None
    assert checked_picks(selector, Selection(MOVED, 0.5, 16, scores)) == expected
    search = os.pathsep.join([str(site.path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "blendhub.cli", "conformance", "selector", name]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True)
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr
