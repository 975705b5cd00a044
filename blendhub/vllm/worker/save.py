"""A save: one chunk on its way from vLLM's blocks into a slot of the arena."""

import time
from contextlib import ExitStack

from blendhub.client.answer import Answer
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import Done
from blendhub.contracts import Transfer
from blendhub.core.spans import Span
from blendhub.vllm.messages import SaveJob
from blendhub.vllm.worker.layer_copies import Transfers


class Save:
    """Waits for the session with the hub or for a later step, is copied, and then committed."""

    def __init__(self, job: SaveJob, timeout_s: float) -> None:
        self.job = job
        self.until = time.monotonic() + timeout_s
        """When the session must be open."""
        self.begun_at = 0.0
        self.copy: Transfer | None = None
        """Set while the copy is under way."""
        self.reads_pages = False
        """Whether the engine's next work does not follow the copy's reads yet."""
        self.commit: Answer[Done] | None = None
        self.client: HubClient | None = None
        """The client that has the right to write, once there is a session."""
        self._parts: list[Transfer] = []
        """The copies of the tokens before ``_at``."""
        self._at = job.slot.span.start
        self._right = ExitStack()
        """The right to write is held until the copy has ended."""

    @property
    def waits(self) -> bool:
        """Whether some tokens have yet to be copied."""
        return self.copy is None and self.commit is None

    @property
    def is_copied(self) -> bool:
        return self.commit is not None

    @property
    def left(self) -> Span:
        """The tokens whose copy has not begun."""
        return Span(self._at, self.job.slot.span.end)

    def begun(self, end: int, parts: list[Transfer], right: ExitStack) -> None:
        """The copy has begun of the tokens up to ``end``, under the right to write."""
        self._at = end
        self._parts += parts
        if not self.left:
            self.copy, self.reads_pages, self.begun_at = Transfers(self._parts), True, time.monotonic()
            self._right = right.pop_all()

    def end_copy(self) -> None:
        """Wait until the copy has ended; raises if it failed."""
        copy, self.copy, self.reads_pages = self.copy, None, False
        with self._right:
            if copy:
                copy.wait()
