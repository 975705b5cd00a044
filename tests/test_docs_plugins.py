"""The whole selector that docs/plugins.md shows keeps the contract."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blendhub import Span
from blendhub.contracts import Selection, checked_picks

PAGE = Path(__file__).parent.parent / "docs" / "plugins.md"
MOVED = [Span(10, 20), Span(20, 30), Span(40, 50)]


@pytest.mark.slow
def test_the_whole_selector_of_the_page_passes_conformance(site):
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (code,) = [code for code in examples if 'PluginSpec(name="beginnings"' in code]
    site.install("short-one", code)
    picks = checked_picks(site.host().create("selector", "beginnings"), Selection(MOVED, 0.5, 16))
    assert picks == [Span(10, 15), Span(20, 25), Span(40, 45)]
    search = os.pathsep.join([str(site.path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "blendhub.cli", "conformance", "selector", "beginnings"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True)
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr
