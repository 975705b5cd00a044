"""Two real ranks on the CPU: processes that run the same function, each with its own ``Ranks``."""

import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import torch

from blendhub.vllm.worker.ranks import Ranks

ENDED = "the engine ended"

ALONE = Ranks(SimpleNamespace(rank_in_group=0, world_size=1))
"""The only rank of an engine."""


def on_two_ranks(work: Callable[[Ranks], Any], patience_s: float = 30.0, limit_s: float = 60.0) -> list[Any]:
    """What the function returned on each rank, ``(ENDED, sentence)`` where it ended the engine, or None where it was
    still running then. Fails if both still run after ``limit_s``.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as place:
        pipes = [fork.Pipe(duplex=False) for _ in range(2)]
        workers = [
            fork.Process(target=_run, args=(rank, place, work, pipes[rank][1], patience_s), daemon=True)
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        try:
            return _answers([reader for reader, _ in pipes], time.monotonic() + limit_s)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _answers(readers: list[Connection], until: float) -> list[Any]:
    found: dict[Any, Any] = {}
    # As vLLM's executor, this ends the others when one has ended.
    while len(found) < len(readers) and not any(one[0] == ENDED for one in found.values()):
        ready = wait([one for one in readers if one not in found], timeout=max(0.0, until - time.monotonic()))
        assert ready, f"the ranks hang; {list(found.values())} came back"
        found |= {one: one.recv() for one in readers if one in ready}
    for one in found.values():
        assert one[0] in (ENDED, "returned"), one
    return [found[one][1] if one in found and found[one][0] != ENDED else found.get(one) for one in readers]


def _run(rank: int, place: str, work: Callable[[Ranks], Any], answer: Any, patience_s: float) -> None:
    torch.set_num_threads(1)  # the parent's threads are not in this process
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    group = SimpleNamespace(
        rank_in_group=rank,
        world_size=2,
        cpu_group=torch.distributed.new_group(backend="gloo"),
        all_reduce=forward_together,
    )
    logging.getLogger("blendhub.vllm.worker.ranks").addHandler(LastWords(answer))
    try:
        answer.send(("returned", work(Ranks(group, timedelta(seconds=patience_s)))))
    except BaseException as error:
        answer.send(("failed", f"{type(error).__name__}: {error}"))


class LastWords(logging.Handler):
    """What a process logs before it ends itself."""

    def __init__(self, answer: Any) -> None:
        super().__init__(logging.CRITICAL)
        self._answer = answer

    def emit(self, record: logging.LogRecord) -> None:
        self._answer.send((ENDED, record.getMessage()))


def forward_together(tensor: torch.Tensor) -> torch.Tensor:
    """What ranks do in a forward: each waits for the other, in a group beside that of ``Ranks``."""
    torch.distributed.all_reduce(tensor)
    return tensor
