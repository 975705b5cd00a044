"""What the two sides of the connector tell each other: the scheduler side in each step, the worker side in return."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from blendhub.layout import Namespace
from blendhub.plan import Span
from blendhub.tokens import Tokens
from blendhub.vllm.decision import Decision
from blendhub.vllm.worker.model.model_check import ModelSupport
from blendhub.wire import Slot
from blendhub.write_rights import WriteRight


class Address(msgspec.Struct, frozen=True):
    """Where the hub is."""

    transport: str
    endpoint: str
    options: dict[str, Any] = {}


class HubPlace(msgspec.Struct, frozen=True):
    """Where the workers find the hub, and the namespace whose session they open first."""

    address: Address
    home: Namespace


class Load(msgspec.Struct, frozen=True):
    """Bring in what was decided for a request, and compute what is missing between."""

    request: str
    space: str
    """The namespace's digest."""
    tokens: Tokens
    """The prompt up to the end of what was decided."""
    blocks: npt.NDArray[np.int64]
    decision: Decision


class Save(msgspec.Struct, frozen=True):
    """Store the KV of ``span``, which this step has computed; slots that it fills are committed."""

    request: str
    space: str
    right: WriteRight
    slots: tuple[Slot, ...]
    """Those that the span touches."""
    span: Span
    blocks: npt.NDArray[np.int64]
    """From that of position 0 on, as far as the span needs."""


@dataclass
class StepPlan(KVConnectorMetadata):
    """From the scheduler's side to the workers'."""

    hub: HubPlace | None = None
    """In one plan only: the first after the scheduler's side has reached the hub."""
    spaces: dict[str, Namespace] = field(default_factory=dict)
    """The namespaces that the jobs below name."""
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    """Requests that were aborted while they were loading."""
    preempted: set[str] = field(default_factory=set)
    """Requests whose blocks this step gives to others."""
    ending: set[str] = field(default_factory=set)
    """Requests that have ended, and of which no plan will name another save. Their blocks are kept until all of
    their saves are copied. A plan names each once: workers answer each time."""
    budget: int = 0
    """How many tokens may be recomputed in this step."""


class LoadResult(msgspec.Struct, frozen=True):
    """How a load went."""

    recomputed: tuple[Span, ...] = ()
    """Moved tokens that were computed anew."""
    holes: int = 0
    seconds: float = 0.0
    error: str = ""
    """Why it failed; empty if it did not."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From a worker to the scheduler's side; all ranks' reports of a step become one."""

    loads: dict[str, LoadResult] = field(default_factory=dict)
    saved_tokens: int = 0
    failed_saves: dict[str, int] = field(default_factory=dict)
    """How many saves failed, by reason."""
    settled: dict[str, int] = field(default_factory=dict)
    """Of requests that have ended: on how many ranks nothing is left to be committed."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        loads = dict(self.loads)
        for request, outcome in other.loads.items():
            if request not in loads or outcome.error:
                loads[request] = outcome
        failed = dict(self.failed_saves)
        for reason, count in other.failed_saves.items():
            failed[reason] = failed.get(reason, 0) + count
        settled = dict(self.settled)
        for request, ranks in other.settled.items():
            settled[request] = settled.get(request, 0) + ranks
        # Every rank saves its shard of the same tokens.
        return WorkerReport(loads, max(self.saved_tokens, other.saved_tokens), failed, settled)


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """What a worker knows about its model once it is loaded."""

    gate: ModelSupport
    weights: str
    rotary: str
