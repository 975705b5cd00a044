"""Whether torch and vLLM can be imported and fit: ``python -m blendhub.cli.checks.versions`` prints what it finds.

That is a process of its own, so that a crash of an import is a finding.
"""

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

import blendhub
from blendhub.cli.checks.subject import Finding, Subject, fail, ok, warn
from blendhub.system.processes import importing_the_same, python_module
from blendhub.system.served_vllm import (
    FOR_CPUS,
    FOR_GPUS,
    FOR_NPUS,
    NUMA,
    SERVED,
    TORCH,
    WITH_NPUS,
    WITHOUT_VISION,
    lacks_numa,
    server_command,
)

IMPORTS_S = 180.0
"""Importing vLLM takes a minute on a machine that is busy."""

DRIVERS = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")


def versions(_: Subject) -> Iterator[Finding]:
    yield ok(
        f"BlendHub {blendhub.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.release()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    )
    command = python_module("blendhub.cli.checks.versions")
    try:
        importing = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=importing_the_same(), timeout=IMPORTS_S
        )
    except subprocess.TimeoutExpired:
        yield fail(f"importing torch and vLLM did not end within {IMPORTS_S:g} s", _install())
        return
    lines = [line for line in importing.stdout.splitlines() if line.startswith('{"verdict":')]
    yield from (msgspec.json.decode(line, type=Finding) for line in lines)
    if code := importing.returncode:
        how = f"signal {-code} ended it" if code < 0 else f"it ended with exit code {code}"
        errors = [line.strip() for line in importing.stderr.splitlines() if line.strip()]
        yield fail(f"importing torch and vLLM broke off: {': '.join([how, *errors[-1:]])}", _install())


def imported() -> Iterator[Finding]:
    """Import torch, vLLM and the connector."""
    for name, look_at in (("torch", _torch), ("vllm", _vllm)):
        if not find_spec(name):
            yield warn(f"{name} is not installed, so a hub can run here, but no engine", _install())
            return
        try:
            module = import_module(name)
        except Exception as error:  # whatever a module raises while it is imported
            mend = WITHOUT_VISION if "torchvision" in str(error) else _install()
            yield fail(f"{name} cannot be imported: {type(error).__name__}: {error}", mend)
            return
        yield look_at(module)


def _torch(torch: Any) -> Finding:
    named = f"torch {torch.__version__}"
    if find_spec("torch_npu"):
        return ok(f"{named}, with torch_npu")
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
        except Exception as error:  # of any class: what the driver says
            mend = "nvidia-smi" if torch.version.cuda else "rocm-smi"
            return warn(f"{named} can use no GPU: {str(error).splitlines()[0]}", mend)
        return ok(f"{named}, with {', '.join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))}")
    if any(driver.exists() for driver in DRIVERS):
        return warn(f"{named} is for CPUs, but this machine has a GPU", "pip install --force-reinstall torch")
    if "bf16" not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"):
        slow = "this one has no instructions for bfloat16: serve models of bfloat16 with --dtype float32"
        return ok(f"{named}, for CPUs; {slow}")
    return ok(f"{named}, for CPUs")


def _vllm(vllm: Any) -> Finding:
    version = vllm.__version__
    try:
        import_module("blendhub.vllm.connector")
    except Exception as error:
        sentence = f"vLLM {version} of {vllm.__file__} does not run BlendHub, which is made for {SERVED}: {error}"
        return fail(sentence, _install())
    if ".".join(version.split(".")[:2]) not in ([WITH_NPUS] if find_spec("torch_npu") else TORCH):
        return warn(f"BlendHub is made for {SERVED}, and was not tested with vLLM {version}", _install())
    if lacks_numa():
        return fail(f"vLLM {version} lacks libnuma.so.1, with which its operators for CPUs are linked", NUMA)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "blendhub" not in allowed.split(","):
        return fail(
            f"VLLM_PLUGINS is {allowed!r}, so vLLM does not load BlendHub's plugin, and has no BlendHubConnector",
            "unset VLLM_PLUGINS",
        )
    return ok(f"vLLM {version} can run BlendHub; its server starts with: {server_command()}")


def _install() -> str:
    if find_spec("torch_npu"):
        return FOR_NPUS
    return FOR_GPUS if any(driver.exists() for driver in DRIVERS) else FOR_CPUS


if __name__ == "__main__":
    for finding in imported():
        print(msgspec.json.encode(finding).decode(), flush=True)
    # What was imported may have started threads that the interpreter would wait for.
    os._exit(0)
