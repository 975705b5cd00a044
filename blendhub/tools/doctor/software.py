"""Whether plugins, the configuration, torch, vLLM and devices fit together and can run here."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import blendhub
from blendhub.core.errors import OptionError, PluginError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.builtin_plugins import HOMES, install_command, same_distribution
from blendhub.framework.discovery import Plugin
from blendhub.framework.options import parse_options
from blendhub.hub.config import HubConfig
from blendhub.system.served_vllm import FOR_CPUS, FOR_GPUS, FOR_NPUS, TESTED, WITH_NPUS, WITHOUT_VISION, server_command
from blendhub.tools.doctor.child import ask
from blendhub.tools.doctor.files import quoted
from blendhub.tools.doctor.finding import Circumstances, Finding, fail, ok, settings_of, warn
from blendhub.vllm.settings import EmbeddedHubConfig, named_plugins
from blendhub.vllm.transfer_config import mistakes_in_transfer_config

NEEDED = {
    "matcher": "pip install 'blendhub[matchers]'",
    "transport": "pip install 'blendhub[transports]'",
    "selector": "pip install 'blendhub[selectors]'",
    "device": "pip install 'blendhub[cpu]'",
}
"""The kinds of plugins that an engine needs, and what installs one of each kind."""


def plugins(at: Circumstances) -> Iterator[Finding]:
    found = at.host.plugins()
    for plugin in found:
        if not plugin.available and plugin.is_missed:
            yield _unusable(plugin)
    for kind, command in NEEDED.items():
        if not any(plugin.kind == kind and plugin.available for plugin in found):
            yield fail(f"no {kind} can be used, and an engine needs one", command)
    usable = [f"{plugin.kind} {plugin.name}" for plugin in found if plugin.available]
    if usable:
        yield ok(f"{len(usable)} can be used: {', '.join(usable)}")
    unmissed = [f"{plugin.kind} {plugin.name} ({plugin.reason})" for plugin in found if not plugin.is_missed]
    if unmissed:
        yield ok(f"{len(unmissed)} are for what this machine does not have: {', '.join(unmissed)}")


def _unusable(plugin: Plugin) -> Finding:
    named = f"{plugin.kind or 'plugin'} {plugin.name} of {plugin.distribution} {plugin.version}"
    if plugin.remedy:
        return warn(f"{named} cannot run here: {plugin.reason}", plugin.remedy)
    is_ours = any(same_distribution(plugin.distribution, f"blendhub-{extra}") for extra in HOMES.values())
    command = "pip install --force-reinstall" if is_ours else "pip uninstall"
    return fail(f"{named} is broken: {plugin.reason}", f"{command} {plugin.distribution}")


def hub_of(flag: Any) -> HubConfig:
    """The embedded hub of a flag; with mistakes in it, which are reported elsewhere, the default one."""
    try:
        return parse_options("hub", EmbeddedHubConfig, settings_of(flag).get("hub"))
    except OptionError:
        return EmbeddedHubConfig()


def configuration(at: Circumstances) -> Iterator[Finding]:
    if at.flag is None:
        return
    wrong = [
        fail(str(mistake), f"blendhub check {quoted(at.config)}")
        for mistake in mistakes_in_transfer_config(at.flag, at.host, at.device)
        # Those concern plugins that are not installed.
        if not isinstance(mistake, PluginError)
    ]
    wrong += _named_plugins(at)
    yield from wrong or [ok("there is no mistake in it, and every plugin that it names can run here")]


def _named_plugins(at: Circumstances) -> Iterator[Finding]:
    found = {(plugin.kind, plugin.name): plugin for plugin in at.host.plugins()}
    for named in named_plugins(at.settings, at.device):
        plugin = found.get((named.kind, named.name))
        if plugin is None:
            try:
                at.host.offered(named.kind, named.name)
            except PluginError as error:
                command = install_command(named.kind, named.name) or "blendhub plugins"
                yield fail(f"{named.key}: {error}", command)
        elif not plugin.available:
            yield fail(
                f"{named.key}: {named.kind} {named.name} cannot be used: {plugin.reason}",
                plugin.remedy or "blendhub plugins",
            )


IMPORTS_S = 180.0
"""Importing vLLM takes a minute on a machine that is busy."""

SLOW = 2.0
"""CPUs without instructions for bfloat16 take three times as long as in float32, and longer."""

NVIDIA = Path("/proc/driver/nvidia/version")
AMD = Path("/sys/module/amdgpu/version")
ASCEND = Path("/usr/local/Ascend/driver/version.info")


def versions(at: Circumstances) -> Iterator[Finding]:
    yield ok(
        f"BlendHub {blendhub.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.release()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores; {_driver()}",
    )
    reply = ask("blendhub.tools.doctor.imports_child", timeout_s=IMPORTS_S)
    steps = {report["step"]: report for report in reply.reports}
    if reply.trouble:
        imported = ", ".join(steps) or "nothing"
        yield fail(
            f"importing torch and vLLM broke off after {imported}: {reply.trouble}",
            to_install(steps),
        )
        return
    yield from _torch(steps)
    yield from _vllm(steps, is_needed=at.flag is not None)


def to_install(steps: dict[str, dict[str, Any]]) -> str:
    """The command that installs what BlendHub is tested with, for this machine's torch."""
    if "torch_npu" in steps:
        return FOR_NPUS
    return FOR_GPUS if NVIDIA.exists() or AMD.exists() else FOR_CPUS


def _driver() -> str:
    if NVIDIA.exists():
        # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
        words = NVIDIA.read_text(encoding="ascii", errors="replace").splitlines()[0].split()
        return f"NVIDIA driver {next((word for word in words if word[0].isdigit()), '?')}"
    if AMD.exists():
        return f"AMD driver {AMD.read_text(encoding='ascii').strip()}"
    if ASCEND.exists():
        return f"Ascend driver {ASCEND.read_text(encoding='ascii', errors='replace').splitlines()[0]}"
    return "no driver of an accelerator"


def _torch(steps: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    torch, npu = steps.get("torch"), steps.get("torch_npu")
    if torch is None:
        yield warn("torch is not installed, so a hub can run here, but no engine", to_install(steps))
        return
    for name, step in (("torch", torch), ("torch_npu", npu)):
        if step and "error" in step:
            yield fail(f"{name} cannot be imported: {step['error']}", to_install(steps))
            return
    built_for = f"for CUDA {torch['cuda']}" if torch["cuda"] else f"for ROCm {torch['hip']}" if torch["hip"] else ""
    named = " ".join(filter(None, [f"torch {torch['version']}", built_for]))
    if npu:
        yield ok(f"{named}, torch_npu {npu['version']}")
    elif "no_gpu" in torch:
        yield warn(f"{named} can use no GPU: {torch['no_gpu']}", "nvidia-smi" if torch["cuda"] else "rocm-smi")
    elif built_for:
        yield ok(f"{named}, with {', '.join(torch['gpus'])}")
    elif NVIDIA.exists() or AMD.exists():
        yield warn(f"{named} is for CPUs, but this machine has a GPU", "pip install --force-reinstall torch")
    elif torch["bfloat16_slowdown"] > SLOW:
        slower = f"takes {torch['bfloat16_slowdown']:.0f} times as long in bfloat16 as in float32"
        yield ok(f"{named}, for CPUs; this one {slower}: serve models of bfloat16 with --dtype float32")
    else:
        yield ok(f"{named}, for CPUs")


def _vllm(steps: dict[str, dict[str, Any]], is_needed: bool) -> Iterator[Finding]:
    vllm, adapter = steps.get("vllm"), steps.get("adapter")
    if vllm is None:
        if "error" not in {**steps.get("torch", {}), **steps.get("torch_npu", {})}:
            found = fail if is_needed else warn
            yield found("vLLM is not installed, so a hub can run here, but no engine", to_install(steps))
        return
    if "error" in vllm:
        mend = WITHOUT_VISION if "torchvision" in vllm["error"] else to_install(steps)
        yield fail(f"vLLM cannot be imported: {vllm['error']}", mend)
        return
    named = f"vLLM {vllm['version']} of {vllm['file']}"
    command = _without(Path(vllm["file"])) or to_install(steps)
    tested = WITH_NPUS if "torch_npu" in steps else TESTED
    if adapter and "error" in adapter:
        yield fail(
            f"{named} does not run BlendHub, which is made for {tested}: {adapter['error']}",
            command,
        )
    elif not vllm["version"].startswith(f"{tested}."):
        yield warn(f"{named} is not {tested}, which BlendHub is tested with", command)
    else:
        yield from _loading(f"vLLM {vllm['version']} can run BlendHub; its server starts with: {server_command()}")


def _without(file: Path) -> str:
    """The command that has Python no longer import a package from a directory that ``PYTHONPATH`` names."""
    folder = file.resolve().parent.parent
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return "unset PYTHONPATH" if any(Path(one).resolve() == folder for one in named) else ""


def _loading(well: str) -> Iterator[Finding]:
    """Check that ``VLLM_PLUGINS``, which lists the entry points that vLLM loads, names BlendHub's."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "blendhub" not in allowed.split(","):
        yield fail(
            f"VLLM_PLUGINS is {allowed!r}, so vLLM does not load BlendHub's plugin, and has no BlendHubConnector",
            "unset VLLM_PLUGINS",
        )
    else:
        yield ok(well)


DEVICE_S = 180.0
"""A device's kernels are compiled the first time."""


def devices(at: Circumstances) -> Iterator[Finding]:
    usable = [plugin.name for plugin in at.host.plugins() if plugin.kind == "device" and plugin.available]
    chosen = at.device_choice
    # One that is chosen and cannot run here is reported where plugins and settings are.
    choices = [PluginChoice(name) for name in usable] if chosen is None else [chosen] * (chosen.name in usable)
    for choice in choices:
        yield _tested(choice)


def _tested(choice: PluginChoice) -> Finding:
    options = msgspec.json.encode(choice.options).decode()
    reply = ask("blendhub.tools.doctor.device_child", choice.name, options, timeout_s=DEVICE_S)
    wrong = reply.trouble or next((str(report["wrong"]) for report in reply.reports), "it reported nothing")
    if not wrong:
        return ok(f"device {choice.name} saved, loaded and moved KV correctly")
    command = install_command("device", choice.name)
    return fail(
        f"device {choice.name} does not work: {wrong}",
        f"{command} --force-reinstall" if command else f"blendhub conformance device {choice.name}",
    )
