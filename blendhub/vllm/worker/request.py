"""The record of one request on a worker."""

from enum import Enum, auto
from typing import TYPE_CHECKING

from blendhub.client.write_rights import WriteRight
from blendhub.vllm.worker.doubts import Watch
from blendhub.vllm.worker.load_task import LoadTask
from blendhub.vllm.worker.recompute import HostCopy
from blendhub.vllm.worker.repairs import Repair

if TYPE_CHECKING:
    from blendhub.vllm.worker.saves import Save


class Ending(Enum):
    """What is left to do of a request that has ended; each comes after the one before."""

    COPYING = auto()
    """vLLM keeps its blocks until all saves are copied, and no repair computes in them."""
    COMMITTING = auto()


class WorkerRequest:
    """Made by the first job that names the request, and forgotten when nothing of it is left to do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.load: LoadTask | None = None
        self.load_number = 0
        """Ranks forget records at different times, but count loads alike."""
        self.saves: list[Save] = []
        """The chunks that are not committed yet, in order."""
        self.failed_rights: set[WriteRight] = set()
        """The rights of failed saves: nothing else is committed under these, which would vouch for what failed."""
        self.maps: dict[int, HostCopy] = {}
        """The maps that its load has made and that are not stored yet, by the ends of their segments."""
        self.repair: Repair | None = None
        self.repaired: HostCopy | None = None
        """Some number that the device computes last of its repair; None if it has."""
        self.watch: Watch | None = None
        """Set while its KV is approximate, and its tokens may be held."""
        self.ending: Ending | None = None

    @property
    def needs_blocks(self) -> bool:
        """Whether a copy or a repair still uses its blocks, or is going to."""
        return self.is_repairing or any(save.needs_blocks for save in self.saves)

    @property
    def is_repairing(self) -> bool:
        """Whether the device still writes its blocks for a repair."""
        if self.repaired and self.repaired.has_arrived:
            self.repaired = None
        return self.repaired is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        is_idle = not (self.load or self.saves or self.maps or self.repair or self.watch or self.is_repairing)
        return is_idle and self.ending is None and not self.failed_rights
