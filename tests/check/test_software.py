"""What is wrong with plugins, vLLM and torch: distributions and directories are made for it."""

import json
import os
import platform
import textwrap

import pytest

from blendhub.cli.checks import software
from blendhub.system.served_vllm import TESTED, WITHOUT_VISION, server_command

pytestmark = pytest.mark.slow

ABSENT = """
    from blendhub import PluginSpec, Unavailable, hookimpl

    @hookimpl
    def blendhub_devices():
        probe = lambda: Unavailable("no such card", "pip install a-card")
        return [PluginSpec(name="odd", api={api}, summary="a device", factory=object, probe=probe)]
"""
PLUGINS, VERSIONS = ["--only", "plugins"], ["--only", "versions"]


def first_on_the_path(folder) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def test_only_what_is_named_must_run_here_and_what_is_broken_always_fails(check, site):
    from blendhub import API_VERSION

    site.install("odd-device", ABSENT.replace("{api}", str(API_VERSION)))
    path = first_on_the_path(site.path)
    report = check(*PLUGINS, PYTHONPATH=path)
    assert report.code == 0, "nothing names what this machine cannot run"
    (finding,) = [one for one in report.findings if "nothing asks for them" in one["sentence"]]
    assert "device odd (no such card)" in finding["sentence"]
    flag = {"kv_connector_extra_config": {"blendhub": {"device": {"name": "odd"}}}}
    for named in ([json.dumps(flag)], ["--device", "odd"]):
        finding = check(*PLUGINS, *named, PYTHONPATH=path).only("fail")
        assert "device: device odd cannot run here: no such card" in finding["sentence"]
        assert finding["command"] == "pip install a-card"
    site.install("broken-plugin", "import nowhere_to_be_found")
    finding = check(*PLUGINS, PYTHONPATH=path).only("fail")
    assert "No module named 'nowhere_to_be_found'" in finding["sentence"]
    assert finding["command"] == "pip install --force-reinstall broken-plugin"


def vllm_in(folder, source: str) -> str:
    package = folder / "first" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(source))
    return first_on_the_path(package.parent)


@pytest.mark.parametrize(
    "source, sentence, command",
    [
        ("__version__ = '0.9.1'", "vLLM 0.9.1 of ", "unset PYTHONPATH"),
        ("import os, sys; print('undefined', file=sys.stderr, flush=True); os.abort()", "signal 6 ended it: undefined",
         None),
        # vLLM's build for CPUs brings a torchvision for another torch, and then cannot be imported.
        ("raise RuntimeError('operator torchvision::nms does not exist')", "torchvision::nms", WITHOUT_VISION),
    ],
    ids=["another", "crashing", "torchvision"],
)  # fmt: skip
def test_a_vllm_that_does_not_fit_fails(check, tmp_path, source, sentence, command):
    finding = check(*VERSIONS, PYTHONPATH=vllm_in(tmp_path, source)).only("fail")
    assert sentence in finding["sentence"] and command in (None, finding["command"])


def test_a_torch_that_cannot_be_imported_fails(check, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    finding = check(*VERSIONS, PYTHONPATH=first_on_the_path(tmp_path)).only("fail")
    assert "torch cannot be imported: ImportError: libcudart.so.13" in finding["sentence"]


@pytest.mark.timeout(600)
def test_the_installed_versions_fit_and_a_cpu_without_instructions_for_bfloat16_is_told_of_float32(check):
    pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
    torch = pytest.importorskip("torch")
    report = check(*VERSIONS, ONEDNN_MAX_CPU_ISA="SSE41")
    assert report.code == 0
    assert report.findings[-1]["sentence"].endswith(f" can run BlendHub; its server starts with: {server_command()}")
    # The variable names instructions of x86, and only builds for CPUs compute with oneDNN.
    if platform.machine() == "x86_64" and not (torch.version.cuda or torch.version.hip):
        sentences = [finding["sentence"] for finding in report.findings]
        assert any("in bfloat16 as in float32: serve models of bfloat16 with" in sentence for sentence in sentences)


def test_vllm_may_be_told_not_to_load_our_plugin(monkeypatch):
    vllm = {"version": f"{TESTED}.0"}
    assert software._vllm(vllm, TESTED, "").verdict == "ok"
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    finding = software._vllm(vllm, TESTED, "")
    assert finding.command == "unset VLLM_PLUGINS" and "VLLM_PLUGINS is 'lora_resolver'" in finding.sentence
