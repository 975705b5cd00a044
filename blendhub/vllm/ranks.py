"""The ranks of a tensor-parallel group. They compute each forward together, so they must decide alike."""

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed import ReduceOp, all_gather, all_reduce

from blendhub.core.errors import BlendHubError

log = logging.getLogger(__name__)
Result = TypeVar("Result")

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others. Ranks may compile for minutes, each at its own pace."""


class RankFailure(BlendHubError):
    """A failure that all ranks know of, so all of them can go on without what failed."""


class Ranks:
    """``group`` is vLLM's: it has a group of torch's for tensors of the CPU, and reduces those of the device."""

    def __init__(self, group: Any, patience: timedelta = PATIENCE) -> None:
        self.number: int = group.rank_in_group
        self.count: int = group.world_size
        self._group = group
        self._patience = patience

    def together(self, work: Callable[[], Result]) -> Result:
        """Do the same work on all ranks. If it fails on one, it fails on all, with the sentence of that rank.

        Work whose ranks wait for each other, as forwards do, must not fail in the middle: see ``end_engine``.
        """
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        if self.count > 1 and not self.least([failure is None])[0]:
            sentences = self.gather(_sentence(failure) if failure else "")
            worst = next(number for number, sentence in enumerate(sentences) if sentence)
            raise RankFailure(f"{sentences[worst]}{self.named(worst)}") from failure
        if failure:
            raise failure
        return result

    def least(self, numbers: Sequence[int]) -> list[int]:
        """For each number, the least of all ranks."""
        return [int(number) for number in self._reduced(torch.tensor(numbers, dtype=torch.int64), ReduceOp.MIN)]

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """For each number, the largest of all ranks, in memory of the CPU."""
        return self._reduced(numbers.clone(), ReduceOp.MAX)

    def sum(self, scores: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, of a tensor on the device."""
        summed: torch.Tensor = self._group.all_reduce(scores) if self.count > 1 else scores
        return summed

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, in their order."""
        if self.count == 1:
            return [text]
        mine = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        longest = int(self.largest(torch.tensor([len(mine)])))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        texts = [torch.zeros_like(padded) for _ in range(self.count)]
        self._wait(all_gather(texts, padded, group=self._group.cpu_group, async_op=True))
        return [text.numpy().tobytes().rstrip(b"\0").decode() for text in texts]

    def named(self, number: int) -> str:
        """The end of sentences about this rank."""
        return f" (rank {number} of {self.count})" if self.count > 1 else ""

    def end_engine(self, sentence: str) -> NoReturn:
        """End this process, and with it the engine: other ranks may wait for this one in the middle of a forward.

        An ordinary exception would not end them. vLLM's executor reads the ranks' answers in order, and would wait for
        that of an earlier rank until a timeout of minutes; but it notices at once when a worker's process has ended.
        An orderly end is not at once: it waits for the accelerator, and for the other ranks to leave their groups.
        """
        log.critical("%s", sentence)
        logging.shutdown()
        os._exit(1)

    def _reduced(self, numbers: torch.Tensor, by: Any) -> torch.Tensor:
        if self.count > 1:
            self._wait(all_reduce(numbers, op=by, group=self._group.cpu_group, async_op=True))
        return numbers

    def _wait(self, work: Any) -> None:
        try:
            work.wait(self._patience)
        except RuntimeError as error:
            self.end_engine(
                f"rank {self.number} of {self.count} waited for the other ranks, and one of them has failed or hangs: "
                f"{error}; the engine ends, see the log of each worker for the first error"
            )


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, BlendHubError) else f"{type(error).__name__}: {error}"
