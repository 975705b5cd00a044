"""What is wrong with plugins, vLLM, torch, devices and configurations: distributions and directories made for it."""

import json
import os
import platform
import textwrap
from pathlib import Path
from typing import Any

import pytest

from blendhub.system.served_vllm import TESTED, WITHOUT_VISION, server_command
from blendhub.tools.doctor import software

pytestmark = pytest.mark.slow

DEVICE = """
    from blendhub import PluginSpec, Unavailable, hookimpl
    {code}

    @hookimpl
    def blendhub_devices():
        return [PluginSpec(name="odd", api=4, summary="a device", factory=make, probe=lambda: {probe})]
"""
ABSENT = DEVICE.format(code="make = None.__class__", probe='Unavailable("no such card", "pip install a-card")')

CRASHING = DEVICE.format(code="import os\n    def make(): os.abort()", probe="None")

WRONG = DEVICE.format(
    code="""
    def make():
        from blendhub_cpu.device import CpuDevice
        from blendhub_cpu import CpuOptions

        class Odd(CpuDevice):
            def load(self, segments, *rest):
                moved = [s.__class__(s.span, s.shard, s.row, s.source_start + 1) for s in segments]
                return super().load(moved, *rest)

        return Odd(CpuOptions())
""",
    probe="None",
)
"""It turns moved keys by one position too few."""


def odd_device(**more: object) -> list[str]:
    return ["--config", json.dumps({"kv_connector_extra_config": {"blendhub": {"device": {"name": "odd"}, **more}}})]


@pytest.fixture
def installed(site, monkeypatch):
    """Installs a distribution beside what is installed."""

    def install(name: str, source: str) -> None:
        site.install(name, source)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site.path), os.environ.get("PYTHONPATH", "")]))

    return install


def of_plugins(report, name: str) -> list[dict]:
    """Findings about one plugin: others of this machine may be unable to run here."""
    return [finding for finding in report.findings if name in finding["sentence"] and finding["verdict"] != "ok"]


def test_a_broken_plugin_fails(doctor, installed):
    installed("broken-plugin", "import nowhere_to_be_found")
    report = doctor("--only", "plugins")
    (found,) = of_plugins(report, "broken")
    assert report.code == 1 and found["verdict"] == "fail"
    assert "No module named 'nowhere_to_be_found'" in found["sentence"]
    assert found["command"] == "pip uninstall broken-plugin"


def test_a_plugin_that_cannot_run_here_is_a_warning_with_its_own_remedy(doctor, installed):
    installed("odd-device", ABSENT)
    report = doctor("--only", "plugins")
    (found,) = of_plugins(report, "odd")
    assert report.code == 3 and found["verdict"] == "warn" and found["command"] == "pip install a-card"
    assert found["sentence"] == "device odd of odd-device 1.0 cannot run here: no such card"


def test_a_plugin_for_what_this_machine_does_not_have_is_no_warning(doctor, installed):
    """Nor are those of the project here: what each of them is for is asked of the machine, and not of a list."""
    installed("odd-device", ABSENT.replace('a-card"', 'a-card", is_missed=False'))
    report = doctor("--only", "plugins")
    assert not of_plugins(report, "odd")
    assert "for what this machine does not have: " in report.text and "device odd (no such card)" in report.text
    nodes = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/davinci_manager")
    if not any(Path(node).exists() for node in nodes):
        assert report.code == 0, report.text


def test_a_plugin_that_a_configuration_names_must_run_here(doctor, installed):
    installed("odd-device", ABSENT)
    flag = json.dumps({"kv_connector": "BlendHubConnector", "kv_role": "kv_both"})
    assert doctor("--only", "configuration", "--config", flag).only("ok")
    report = doctor("--only", "configuration", *odd_device(selector={"name": "hkdv"}))
    sentences = {finding["sentence"]: finding["command"] for finding in report.findings}
    where = "kv_connector_extra_config.blendhub"
    assert report.code == 1
    assert sentences[f"{where}.device: device odd cannot be used: no such card"] == "pip install a-card"
    assert any(f"{where}.selector: no selector 'hkdv' (did you mean 'hkvd'?)" in sentence for sentence in sentences)
    assert sentences["kv-transfer-config needs the option 'kv_role'"] == "blendhub check -"


def test_a_missing_plugin_of_ours_comes_with_the_command_that_installs_it(doctor, installed):
    """Its distribution is there, but without its entry point, as after an update that broke off."""
    flag: dict[str, Any] = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}
    flag["kv_connector_extra_config"] = {"blendhub": {"matchers": [{"name": "rolling_hsh"}]}}
    found = doctor("--only", "configuration", "--config", json.dumps(flag)).only("fail")
    assert "no matcher 'rolling_hsh' (did you mean 'rolling_hash'?)" in found["sentence"]


def test_a_configuration_that_cannot_be_read_is_one_line_and_exit_code_2(doctor, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text('api_key: sk-abcdef\nkv-transfer-config: \'{"kv_role": \n')
    with pytest.raises(AssertionError) as nothing_printed:
        doctor("--only", "configuration", "--config", str(file))
    error = str(nothing_printed.value)
    assert "serve.yaml is not YAML" in error and "in line 3" in error and "sk-abcdef" not in error


def test_an_unknown_check_is_named(doctor):
    with pytest.raises(AssertionError, match=r"no check 'huge-page' \(did you mean 'huge-pages'\?\)"):
        doctor("--only", "huge-page")


def vllm_in(folder, source: str) -> str:
    package = folder / "first" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(source))
    return os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])


def test_another_vllm_first_on_the_path_fails(doctor, tmp_path):
    found = doctor("--only", "versions", PYTHONPATH=vllm_in(tmp_path, "__version__ = '0.9.1'")).only("fail")
    assert f"vLLM 0.9.1 of {tmp_path}/first/vllm/__init__.py does not run BlendHub" in found["sentence"]
    assert "made for 0.32" in found["sentence"] and "No module named 'vllm." in found["sentence"]
    assert found["command"] == "unset PYTHONPATH"


def test_a_vllm_that_ends_its_process_fails(doctor, tmp_path):
    path = vllm_in(
        tmp_path, "import os, sys; print('undefined symbol', file=sys.stderr); sys.stderr.flush(); os.abort()"
    )
    found = doctor("--only", "versions", PYTHONPATH=path).only("fail")
    assert "broke off after torch: signal 6 ended it: undefined symbol" in found["sentence"]


def test_a_torchvision_for_another_torch_is_to_be_removed(doctor, tmp_path):
    """vLLM's build for CPUs brings it, and then cannot be imported."""
    source = "raise RuntimeError('operator torchvision::nms does not exist')"
    found = doctor("--only", "versions", PYTHONPATH=vllm_in(tmp_path, source)).only("fail")
    assert "operator torchvision::nms does not exist" in found["sentence"] and found["command"] == WITHOUT_VISION


def test_a_torch_that_cannot_be_imported_fails(doctor, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = doctor("--only", "versions", PYTHONPATH=path).only("fail")
    assert "torch cannot be imported: ImportError: libcudart.so.13" in found["sentence"]


@pytest.mark.timeout(600)
def test_the_installed_versions_fit_and_a_cpu_without_instructions_for_bfloat16_is_told_of_float32(doctor):
    pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
    torch = pytest.importorskip("torch")
    report = doctor("--only", "versions", ONEDNN_MAX_CPU_ISA="SSE41")
    assert report.code == 0
    assert report.findings[-1]["sentence"].endswith(f" can run BlendHub; its server starts with: {server_command()}")
    # The variable names instructions of x86, and only builds for CPUs compute with oneDNN.
    if platform.machine() == "x86_64" and not (torch.version.cuda or torch.version.hip):
        assert "in bfloat16 as in float32: serve models of bfloat16 with --dtype float32" in report.text


def test_vllm_may_be_told_not_to_load_our_plugin(monkeypatch):
    imported = {"torch": {}, "vllm": {"version": f"{TESTED}.0", "file": "vllm/__init__.py"}, "adapter": {}}
    (found,) = software._vllm(imported, is_needed=True)
    assert found.verdict == "ok"
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    (found,) = software._vllm(imported, is_needed=True)
    assert found.verdict == "fail" and found.command == "unset VLLM_PLUGINS"
    assert "VLLM_PLUGINS is 'lora_resolver'" in found.sentence


@pytest.mark.parametrize(
    "source, wrong",
    [(WRONG, "keys that were loaded where they were saved differ"), (CRASHING, "signal 6 ended it")],
    ids=["wrong", "crashing"],
)
def test_a_device_that_does_not_work_fails(doctor, installed, source, wrong):
    installed("odd-device", source)
    found = doctor("--only", "devices", *odd_device()).only("fail")
    assert f"device odd does not work: {wrong}" in found["sentence"]
    assert found["command"] == "blendhub conformance device odd"


def test_a_device_that_works_is_called_so(doctor):
    found = doctor("--only", "devices", "--device", "cpu").only("ok")
    assert "device cpu saved, loaded and moved KV correctly" in found["sentence"]
