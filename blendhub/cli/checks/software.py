"""Whether the settings, the plugins, torch and vLLM fit together and can run here."""

import contextlib
import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import blendhub
from blendhub.cli.checks.finding import Finding, Subject, fail, ok, warn
from blendhub.core.errors import BlendHubError, OptionError, PluginError
from blendhub.framework.options import parse_options
from blendhub.system.processes import importing_the_same, python_module
from blendhub.system.served_vllm import FOR_CPUS, FOR_GPUS, FOR_NPUS, TESTED, WITH_NPUS, WITHOUT_VISION, server_command
from blendhub.vllm.scheduler.startup import ROOMY, finds_prefixes, why_none_is_stored
from blendhub.vllm.settings import OWNER, Settings, named_plugins
from blendhub.vllm.transfer_config import check_transfer_config


def settings(subject: Subject) -> Iterator[Finding]:
    """The first mistake in the engine's configuration. Whether plugins can run here is checked with the plugins."""
    if subject.flag is None:
        return
    try:
        parsed = check_transfer_config(subject.flag, subject.host, subject.device)
    except BlendHubError as error:
        yield fail(str(error))
    else:
        yield ok(f"no mistakes; {_what_becomes_of_blended(subject, parsed)}")


def _what_becomes_of_blended(subject: Subject, parsed: Settings) -> str:
    try:
        why = why_none_is_stored(parsed, subject.flag["kv_role"], finds_prefixes(subject.host, parsed))
    except PluginError as error:
        return f"whether blended KV is stored is not known: {error}"
    if why:
        return f"blended KV is not stored: {why}"
    if parsed.store_blended:
        return "blended KV is stored, too"
    return f"blended KV is stored, too, if the arena holds {ROOMY} prompts of max_model_len: vLLM's log says whether"


NEEDED = {
    "matcher": "pip install 'blendhub[matchers]'",
    "transport": "pip install 'blendhub[transports]'",
    "selector": "pip install 'blendhub[selectors]'",
    "device": "pip install 'blendhub[cpu]'",
}
"""The kinds of plugins that an engine needs, and what installs one of each kind."""


def plugins(subject: Subject) -> Iterator[Finding]:
    """Whether what is named can run here, and what is broken. A plugin that nothing names may need another machine."""
    installed = subject.host.plugins()
    named = {}
    with contextlib.suppress(OptionError):  # which is a finding of the settings
        chosen = parse_options(OWNER, Settings, subject.settings)
        named = {(plugin.kind, plugin.name): plugin.key for plugin in named_plugins(chosen, subject.device)}
    if subject.toml and subject.toml.store:
        named["store", subject.toml.store.name] = "store"
    unused = []
    for plugin in installed:
        if plugin.available:
            continue
        if plugin.remedy is None:
            broken = f"{plugin.kind or 'plugin'} {plugin.name} of {plugin.distribution} {plugin.version}"
            yield fail(f"{broken} is broken: {plugin.reason}", f"pip install --force-reinstall {plugin.distribution}")
        elif key := named.get((plugin.kind or "", plugin.name)):
            yield fail(f"{key}: {plugin.kind} {plugin.name} cannot run here: {plugin.reason}", plugin.remedy)
        else:
            unused.append(f"{plugin.kind} {plugin.name} ({plugin.reason})")
    usable = [(plugin.kind, plugin.name) for plugin in installed if plugin.available]
    for kind, command in NEEDED.items():
        if kind not in dict(usable):
            yield fail(f"no {kind} can be used, and an engine needs one", command)
    if usable:
        yield ok(f"{len(usable)} can be used: {', '.join(f'{kind} {name}' for kind, name in usable)}")
    if unused:
        yield ok(f"{len(unused)} cannot run here, and nothing asks for them: {', '.join(unused)}")


IMPORTS_S = 180.0
"""Importing vLLM takes a minute on a machine that is busy."""

SLOW = 2.0
"""CPUs without instructions for bfloat16 take three times as long as in float32, and longer."""

NVIDIA, AMD = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")


def versions(subject: Subject) -> Iterator[Finding]:
    """Import torch, vLLM and the connector in another process: a crash there is a finding here."""
    yield ok(
        f"BlendHub {blendhub.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.release()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    )
    steps, trouble = _imported()
    install = FOR_NPUS if "torch_npu" in steps else FOR_GPUS if NVIDIA.exists() or AMD.exists() else FOR_CPUS
    if trouble:
        yield fail(f"importing torch and vLLM broke off after {', '.join(steps) or 'nothing'}: {trouble}", install)
        return
    missing = fail if subject.flag is not None else warn
    for name, step in steps.items():
        if error := step.get("error"):
            yield _not_imported(name, error, steps, install)
            return
    if "torch" not in steps:
        yield missing("torch is not installed, so a hub can run here, but no engine", install)
        return
    yield _torch(steps["torch"], is_npu="torch_npu" in steps)
    if "vllm" not in steps:
        yield missing("vLLM is not installed, so a hub can run here, but no engine", install)
        return
    yield _vllm(steps["vllm"], WITH_NPUS if "torch_npu" in steps else TESTED, install)


def _imported() -> tuple[dict[str, dict[str, Any]], str]:
    """What each import told, and why the process ended if it did not end well."""
    process = subprocess.Popen(
        python_module("blendhub.cli.checks.imports"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=importing_the_same(),
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=IMPORTS_S)
    except subprocess.TimeoutExpired:
        # With the processes that it started: they hold its output, which is read to the end.
        os.killpg(process.pid, signal.SIGKILL)
        said, errors = process.communicate()
        errors = f"it did not end within {IMPORTS_S:g} s"
    reports = [msgspec.json.decode(line) for line in said.splitlines() if line.startswith('{"step":')]
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    code = process.returncode
    how = "" if not code else f"signal {-code} ended it" if code < 0 else f"it ended with exit code {code}"
    return {report["step"]: report for report in reports}, how and (f"{how}: {last}" if last else how)


def _not_imported(name: str, error: str, steps: dict[str, dict[str, Any]], install: str) -> Finding:
    if name != "connector":
        mend = WITHOUT_VISION if "torchvision" in error else install
        return fail(f"{'vLLM' if name == 'vllm' else name} cannot be imported: {error}", mend)
    vllm, tested = steps["vllm"], WITH_NPUS if "torch_npu" in steps else TESTED
    # A directory in PYTHONPATH comes before the environment's own packages.
    folder = Path(vllm["file"]).resolve().parent.parent
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return fail(
        f"vLLM {vllm['version']} of {vllm['file']} does not run BlendHub, which is made for {tested}: {error}",
        "unset PYTHONPATH" if any(Path(place).resolve() == folder for place in named) else install,
    )


def _torch(torch: dict[str, Any], *, is_npu: bool) -> Finding:
    named = f"torch {torch['version']}"
    if is_npu or torch.get("gpus"):
        return ok(f"{named}, with {', '.join(torch.get('gpus', ())) or 'torch_npu'}")
    if "no_gpu" in torch:
        return warn(f"{named} can use no GPU: {torch['no_gpu']}", "nvidia-smi" if NVIDIA.exists() else "rocm-smi")
    if NVIDIA.exists() or AMD.exists():
        return warn(f"{named} is for CPUs, but this machine has a GPU", "pip install --force-reinstall torch")
    if torch["bfloat16_slowdown"] > SLOW:
        slower = f"takes {torch['bfloat16_slowdown']:.0f} times as long in bfloat16 as in float32"
        return ok(f"{named}, for CPUs; this one {slower}: serve models of bfloat16 with --dtype float32")
    return ok(f"{named}, for CPUs")


def _vllm(vllm: dict[str, Any], tested: str, install: str) -> Finding:
    if not vllm["version"].startswith(f"{tested}."):
        return warn(f"vLLM {vllm['version']} is not {tested}, which BlendHub is tested with", install)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "blendhub" not in allowed.split(","):
        return fail(
            f"VLLM_PLUGINS is {allowed!r}, so vLLM does not load BlendHub's plugin, and has no BlendHubConnector",
            "unset VLLM_PLUGINS",
        )
    return ok(f"vLLM {vllm['version']} can run BlendHub; its server starts with: {server_command()}")
