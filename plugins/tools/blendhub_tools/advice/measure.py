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

import msgspec

from blendhub.core.errors import BlendHubError
from blendhub_tools.advice.answering import Engine, Job, Part, Served


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
            with child.stdin as stdin:
                stdin.write(msgspec.json.encode(job))
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
    for message in itertools.chain([engine.served], engine.in_full(), *ratios):
        os.write(out, msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
