"""Runs vLLM engines that answer every prompt in full and at every ratio, each in a separate process.

That process, ``python -m blendhub_tools.advice.measure``, reads a ``Job`` from standard input, and writes what becomes
of it to the file descriptor that is its argument, a line of JSON each, apart from vLLM's own output.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec

from blendhub.contracts import Selection, Selector, checked_picks
from blendhub.core.errors import BlendHubError
from blendhub.core.spans import Span
from blendhub.framework.host import PluginHost
from blendhub_tools.advice.answering import Engine, Job, Part, Served
from blendhub_tools.advice.choice import selector_of


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
                yield msgspec.json.decode(line, type=Served | Part)
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
    engine = Engine(job)
    engine.store()
    ratios = (engine.blended(ratio) for ratio in job.ratios)
    for said in itertools.chain([engine.served], engine.in_full(), *ratios):
        os.write(out, msgspec.json.encode(said) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
