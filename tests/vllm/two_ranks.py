"""Two real ranks on the CPU: processes that run the same function, each with its own ``Ranks``."""

import logging
import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import torch

from blendhub.vllm.ranks import Ranks

ENDED = "the engine ended"
LIMIT_S = 60.0

ALONE = Ranks(SimpleNamespace(rank_in_group=0, world_size=1))
"""The only rank of an engine."""


def on_two_ranks(work: Callable[[Ranks], Any], patience_s: float = 30.0) -> list[Any]:
    """What the function returned on each rank, ``(ENDED, sentence)`` where it ended the engine, or None where it was
    still running then.
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
        answers: dict[Any, tuple[str, Any]] = {}
        try:
            # As vLLM's executor, this ends the others when one has ended.
            while len(answers) < 2 and not any(how == ENDED for how, _ in answers.values()):
                ready = wait([reader for reader, _ in pipes if reader not in answers], LIMIT_S)
                assert ready, f"the ranks hang; {list(answers.values())} came back"
                answers |= {reader: reader.recv() for reader, _ in pipes if reader in ready}
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    assert all(how in (ENDED, "returned") for how, _ in answers.values()), answers
    by_rank = [answers.get(reader) for reader, _ in pipes]
    return [answer and (answer if answer[0] == ENDED else answer[1]) for answer in by_rank]


def _run(rank: int, place: str, work: Callable[[Ranks], Any], answer: Any, patience_s: float) -> None:
    torch.set_num_threads(1)  # the parent's threads are not in this process
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    cpu_group = torch.distributed.new_group(backend="gloo")
    group = SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group=cpu_group, all_reduce=forward_together)
    last_words = logging.Handler(logging.CRITICAL)
    last_words.emit = lambda record: answer.send((ENDED, record.getMessage()))
    logging.getLogger("blendhub.vllm.ranks").addHandler(last_words)
    try:
        answer.send(("returned", work(Ranks(group, timedelta(seconds=patience_s)))))
    except BaseException as error:
        answer.send(("failed", f"{type(error).__name__}: {error}"))


def forward_together(tensor: torch.Tensor) -> torch.Tensor:
    """What ranks do in a forward: each waits for the other, in a group beside that of ``Ranks``."""
    torch.distributed.all_reduce(tensor)
    return tensor
