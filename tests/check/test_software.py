"""What is wrong with plugins, vLLM and torch: distributions and directories are made for it."""

import json
import os
import textwrap

import pytest

from blendhub import API_VERSION
from blendhub.system.served_vllm import WITHOUT_VISION, server_command, transfer_config

pytestmark = pytest.mark.slow

ABSENT = f"""
    from blendhub import PluginSpec, Unavailable, hookimpl

    @hookimpl
    def blendhub_devices():
        probe = lambda: Unavailable("no such card", "pip install a-card")
        return [PluginSpec(name="odd", api={API_VERSION}, summary="a device", factory=object, probe=probe)]
"""
PLUGINS, VERSIONS = ["--only", "plugins"], ["--only", "versions"]


def first_on_the_path(folder) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def test_only_what_is_named_must_run_here_and_what_is_broken_always_fails(check, site):
    site.install("odd-device", ABSENT)
    path = first_on_the_path(site.path)
    report = check(*PLUGINS, PYTHONPATH=path)
    assert report.code == 0, "nothing names what this machine cannot run"
    assert "device odd (no such card)" in report.findings[-1]["sentence"]
    for named in ([json.dumps(transfer_config({"device": {"name": "odd"}}))], ["--device", "odd"]):
        finding = check(*PLUGINS, *named, PYTHONPATH=path).only("fail")
        assert "device: device odd cannot run here: no such card" in finding["sentence"]
        assert finding["command"] == "pip install a-card"
    site.install("broken-plugin", "import nowhere_to_be_found")
    finding = check(*PLUGINS, PYTHONPATH=path).only("fail")
    assert "No module named 'nowhere_to_be_found'" in finding["sentence"]
    assert finding["command"] == "pip install --force-reinstall broken-plugin"


@pytest.mark.parametrize(
    "name, source, sentence, command",
    [
        ("vllm", "__version__ = '0.9.1'", "vLLM 0.9.1 of ", None),
        (
            "vllm",
            "import os, sys; print('why', file=sys.stderr, flush=True); os.abort()",
            "signal 6 ended it: why",
            None,
        ),
        # vLLM's build for CPUs brings a torchvision for another torch, and then cannot be imported.
        ("vllm", "raise RuntimeError('operator torchvision::nms does not exist')", "torchvision::nms", WITHOUT_VISION),
        ("torch", "raise ImportError('libcudart.so.13')", "torch cannot be imported: ImportError: libcudart", None),
    ],
    ids=["another", "crashing", "torchvision", "torch"],
)
def test_a_torch_or_a_vllm_that_does_not_fit_fails(check, tmp_path, name, source, sentence, command):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(textwrap.dedent(source))
    finding = check(*VERSIONS, PYTHONPATH=first_on_the_path(tmp_path)).only("fail")
    assert sentence in finding["sentence"] and command in (None, finding["command"])


@pytest.mark.timeout(600)
def test_the_installed_versions_fit_unless_vllm_is_told_not_to_load_our_plugin(check):
    pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
    report = check(*VERSIONS)
    assert report.code == 0
    assert report.findings[-1]["sentence"].endswith(f" can run BlendHub; its server starts with: {server_command()}")
    finding = check(*VERSIONS, VLLM_PLUGINS="lora_resolver").only("fail")
    assert finding["command"] == "unset VLLM_PLUGINS" and "VLLM_PLUGINS is 'lora_resolver'" in finding["sentence"]
