"""The core is light: what only some plugins need is imported only for them."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "zmq", "pytest", "hypothesis", "transformers", "vllm")


@pytest.mark.parametrize(
    "code",
    [
        "import blendhub",
        "import blendhub.contracts, blendhub.core, blendhub.system, blendhub.framework.options",
        "import blendhub.cli",
        "from blendhub import PluginHost; PluginHost.discover().plugins()",
        "import blendhub_tools.analysis.analyzer, blendhub_tools.analysis.findings, blendhub_tools.analysis.report",
        "import blendhub.vllm.settings, blendhub.vllm.transfer_config",
    ],
)
def test_does_not_import_anything_heavy(code):
    report = f"{code}; import sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_suites_of_other_plugins_than_devices_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; from blendhub.testing import MatcherSuite, StoreSuite"
    subprocess.run([sys.executable, "-c", code], check=True)
