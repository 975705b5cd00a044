"""Checks the versions of what BlendHub runs with: Python, drivers, torch and vLLM."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blendhub
from blendhub.system.served_vllm import FOR_CPUS, FOR_GPUS, FOR_NPUS, TESTED, WITH_NPUS, WITHOUT_VISION, server_command
from blendhub.tools.doctor.child import ask
from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding, fail, ok, warn

TIMEOUT_S = 180.0
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
    reply = ask("blendhub.tools.doctor.imports_child", timeout_s=TIMEOUT_S)
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
