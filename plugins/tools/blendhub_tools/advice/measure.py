"""Runs vLLM engines that answer every prompt in full and at every ratio, each in a separate process.

That process, ``python -m blendhub_tools.advice.measure``, reads a ``Job`` from standard input, and writes what becomes
of it to the file descriptor that is its argument, a line of JSON each, apart from vLLM's own output.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from blendhub.contracts import Selection, Selector, checked_picks
from blendhub.core.errors import BlendHubError, InvalidInput
from blendhub.core.spans import Span
from blendhub.framework.host import PluginHost
from blendhub_tools.advice.answering import Engine, Job, Part, Served
from blendhub_tools.advice.choice import selector_of


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served here."""

    reason: str


def distinct_ratios(host: PluginHost, settings: dict[str, Any], ratios: tuple[float, ...]) -> tuple[float, ...]:
    """The ratios at which the selector picks differently: one is enough if it goes by a rule without a ratio."""
    name, options = settings["selector"]["name"], settings["selector"].get("options", {})
    selector: Selector = host.create("selector", name, options)
    if "own_ratio" not in host.spec("selector", name).capabilities or selector.probe_layer:
        return ratios
    moved = [Span(0, 512), Span(512, 1024)]
    picked: dict[tuple[Span, ...], float] = {}
    for ratio in ratios:
        picked.setdefault(tuple(checked_picks(selector, Selection(moved, ratio))), ratio)
    return tuple(picked.values())


def measured_with(settings: dict[str, Any], selector: str) -> dict[str, Any]:
    """The person's settings with this selector, without limits that would refuse to blend."""
    free = {"audit_share": 0, "mode": "blend"}
    policy = {**settings.get("policy", {}), "max_recompute_share": 1.0}
    return {**settings, **free, "selector": selector_of(selector, settings), "policy": policy}


def run_engine(job: Job) -> Iterator[Served | Part]:
    """Run an engine, and yield its measurements as they arrive. vLLM's output is shown only if the engine fails."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as log, open(read, "rb") as lines:
        child = subprocess.Popen(
            [sys.executable, "-m", "blendhub_tools.advice.measure", str(write)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[write],
            # vLLM starts processes that would outlive this one: all of them end together.
            start_new_session=True,
        )
        os.close(write)
        try:
            assert child.stdin
            with child.stdin as given:
                given.write(msgspec.json.encode(job))
            for line in lines:
                said = msgspec.json.decode(line, type=Served | Part | Refused)
                if isinstance(said, Refused):
                    raise InvalidInput(said.reason)
                yield said
            code = child.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if code:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise BlendHubError(
                f"vLLM failed with the selector {job.selector} (exit code {code}), see above; --engine sets arguments"
            )


def main(out: int) -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    for said in _measured(job):
        os.write(out, msgspec.json.encode(said) + b"\n")


def _measured(job: Job) -> Iterator[Served | Part | Refused]:
    try:
        _check_model(job.model, job.engine)
    except InvalidInput as error:
        yield Refused(str(error))
        return
    engine = Engine(job)
    engine.store()
    yield engine.served
    yield from engine.in_full()
    for ratio in job.ratios:
        yield from engine.blended(ratio)


def _check_model(model: str, engine: dict[str, Any]) -> None:
    """Look at the model's files before vLLM does, which would take minutes and say it in pages.

    Raises InvalidInput if weights in this directory are cut short, or more than the memory of vLLM's devices.
    """
    from safetensors import SafetensorError, safe_open
    from vllm.platforms import current_platform

    files = sorted(Path(model).glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass  # opening compares the length of the file with what its header says
        except SafetensorError as error:
            raise InvalidInput(f"{file} is cut short or damaged ({error}): download or copy it again") from None
    ranks = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    memory = ranks * current_platform.get_device_total_memory() + engine.get("cpu_offload_gb", 0) * 2**30
    needed = sum(file.stat().st_size for file in files)
    if needed > memory:
        raise InvalidInput(
            f"the weights of {model} take {needed / 2**30:.1f} GiB, and {ranks} x {current_platform.device_type} has "
            f"{memory / 2**30:.1f} GiB of memory: measure on a larger machine, or on more devices, as with "
            """--engine '{"tensor_parallel_size": 2}'"""
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
