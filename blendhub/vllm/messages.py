"""The messages between scheduler and workers: a plan for each step, and a report from each worker."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from blendhub.client.wire import Slot
from blendhub.client.write_rights import WriteRight
from blendhub.contracts import PageSegment, Segment
from blendhub.core.layout import Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.decision import Decision
from blendhub.vllm.model_support import ModelSupport

StateBlocks: TypeAlias = dict[int, int]
"""A block with a state, by the block tables of recurrent layers."""

NULL_BLOCK = 0
"""The block that vLLM puts in the place of blocks which it did not allocate, or has freed: they left the window."""


class HubAddress(msgspec.Struct, frozen=True):
    """The hub's endpoint, and the transport that reaches it."""

    endpoint: str
    transport: PluginChoice


class HubPlace(msgspec.Struct, frozen=True):
    """The hub's address for the workers, and the namespace that they register with."""

    address: HubAddress
    namespace: Namespace


class LoadedAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter in the memory of one rank."""

    weights: str
    """The name of the adapter's weights."""
    since: int
    """The step in which the adapter's id got these weights."""


class Adapter(msgspec.Struct, frozen=True):
    """A request's LoRA adapter, as all ranks have loaded it."""

    id: int
    """The id of vLLM's ``LoRARequest``."""
    weights: str
    since: int
    """The step in which the last rank got the weights."""


class LoadSource(msgspec.Struct, frozen=True):
    """Where a load's KV lies, and the right to read it."""

    lease: int | None
    """The lease of the lookup. Workers release it when all ranks have copied; the scheduler does if the load fails.
    None: nothing is read under one."""
    epoch: int
    """The epoch of the hub that gave the lease."""
    pieces: tuple[Segment, ...]
    """What to load of the decision's matches, chunk by chunk, with the places of rank 0's shards."""
    state: int | None = None
    """The slot with the state to load, behind the last exact match."""
    donors: tuple[tuple[PageSegment, ...], ...] = ()
    """For each block table, what is copied from other blocks of it, and not from the arena."""


class LoadJob(msgspec.Struct, frozen=True):
    """Load the KV that was decided for a request, and compute the holes and the chosen moved tokens."""

    request: str
    tokens: Tokens
    """The whole prompt: a selector may look at the question, which comes after the decision's end."""
    blocks: tuple[npt.NDArray[np.int64], ...]
    """The request's blocks in each block table that vLLM keeps for it, with those borrowed until it is loaded; of a
    table of recurrent layers, the block for the state, and behind it the one with the state to begin with, if any."""
    decision: Decision
    source: LoadSource
    adapter: Adapter | None = None
    """The adapter that the KV was computed with."""
    keeps: StateBlocks = {}
    """Where the states before the first moved text are copied, for a repair; empty if none are needed."""


class RepairStates(msgspec.Struct, frozen=True, kw_only=True):
    """Where a repair has states of recurrent layers; apart from those with which the answer goes on meanwhile."""

    running: StateBlocks
    """The states that go over the tokens as they are computed anew."""
    shown: StateBlocks
    """Where those behind ``shown_end`` tokens are copied, for vLLM's prefix cache; empty: nowhere."""
    shown_end: int


class RepairJob(msgspec.Struct, frozen=True, kw_only=True):
    """Compute approximate KV anew, behind exact KV."""

    request: str
    span: Span
    tokens: Tokens
    """Those of the span, and the next one if it is known."""
    blocks: tuple[npt.NDArray[np.int64], ...]
    """The request's blocks in each block table, from position 0 on; of recurrent layers, up to the state behind the
    step."""
    prompt_tokens: int
    compares: bool
    """Whether the answer's tokens are compared with what the model predicts."""
    is_first: bool
    asks: int | None = None
    """For an audit's first job: the prompt's last token, behind which the model predicts from blended KV."""
    is_last: bool
    """Whether everything that is computed of the request is exact then."""
    states: RepairStates | None = None
    """Those of the repair; None without recurrent layers."""


class DoubtJob(msgspec.Struct, frozen=True, kw_only=True):
    """Look at what the model predicts behind the last token that a step computes of a request with approximate KV.

    If the model is in doubt, the step waits until all KV is exact, and the token is sampled from the exact prediction.
    """

    request: str
    margin: float
    """The model is in doubt if the second token is so much less likely than the first, or less: in nats."""
    span: Span
    """The tokens that are approximate, up to the last one of this step."""
    tokens: Tokens
    """The known ones of them that earlier jobs did not bring. The runner may be alone in knowing the last one."""
    blocks: tuple[npt.NDArray[np.int64], ...]
    """The request's blocks in each block table that earlier jobs did not bring."""
    is_first: bool
    seconds: float
    """How long the step would probably be held."""
    prompt_tokens: int
    compares: bool
    """Whether nothing but the model decides about the answer's tokens, which are compared with what it predicts."""
    is_audited: bool
    """Whether the prediction behind the prompt is kept, to be compared with the one from exact KV."""
    states: RepairStates | None = None
    """Those of the repair; None without recurrent layers."""


class SaveJob(msgspec.Struct, frozen=True):
    """Store the KV of a chunk, and commit it. The plan of the step that completes the chunk has it."""

    request: str
    right: WriteRight
    slot: Slot
    blocks: tuple[npt.NDArray[np.int64], ...]
    """The request's blocks in each block table, from position 0 on; empty until the chunk is complete. Of a table of
    recurrent layers, the one block with the state."""
    adapter: Adapter | None = None
    """The adapter that the KV was computed with."""
    has_state: bool = False
    """Whether the chunk ends with a state."""
    map_bytes: int = 0
    """The bytes of the map with which the chunk ends, on one rank."""


@dataclass(kw_only=True)
class StepPlan(KVConnectorMetadata):
    """The scheduler's message to the workers about one step."""

    hub: HubPlace | None = None
    """Set in one plan only: the first after the scheduler has reached the hub."""
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    repair: RepairJob | None = None
    unrepaired: set[str] = field(default_factory=set)
    """Requests whose repair will not go on."""
    doubts: list[DoubtJob] = field(default_factory=list)
    pause_s: float = 0.0
    """How long the step may be held for tokens in doubt."""
    cancelled: set[str] = field(default_factory=set)
    """Requests that have ended while they were loading, or with nothing to store."""
    preempted: set[str] = field(default_factory=set)
    """Requests whose blocks vLLM has freed for other requests in this step."""
    ending: set[str] = field(default_factory=set)
    """Requests that have ended, with no further saves and no repair. Their blocks are kept until all saves are copied.
    Each request is named in one plan only, because workers answer each time."""
    number: int = 0
    """The number of the step, counted from the engine's start."""
    budget: int = 0
    """The most tokens to recompute in this step."""
    computes: bool = False
    """Whether vLLM computes tokens in this step."""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a load ended."""

    recomputed: tuple[Span, ...] = ()
    """The moved tokens that were recomputed."""
    holes: int = 0
    segments: tuple[tuple[Span, int], ...] = ()
    """The segments whose maps were made, and the bytes of each on one rank."""
    load_seconds: float = 0.0
    """The seconds until the KV was copied."""
    probe_seconds: float = 0.0
    """The seconds spent on choosing the tokens to recompute."""
    recompute_seconds: float = 0.0
    error: str = ""
    """Why the load failed; empty if it succeeded."""
    another_failed: bool = False
    """Whether this rank ended its load because another one failed."""


class HeldToken(msgspec.Struct, frozen=True):
    """A token in doubt, for which the rest of the repair was computed at once."""

    step: int
    """The step that was held."""
    position: int
    """The token's position in the request."""
    margin: float
    """By how much the second token was less likely than the first one, in nats."""
    agrees: bool
    """Whether the likeliest token is the same from exact KV."""
    kl: float
    """The divergence of the prediction from blended KV, in nats."""
    seconds: float
    """How long the step was held."""


class RepairResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a repair ended."""

    tokens: int = 0
    """The number of tokens that were computed anew."""
    compared: int = 0
    """The number of the answer's tokens that were compared with what the model predicts from exact KV."""
    differing: tuple[int, ...] = ()
    """Those of them that are not the likeliest, counted from 0."""
    audit: AuditOutcome | None = None
    held: HeldToken | None = None
    """Set if a token in doubt has ended the repair."""
    error: str = ""


class WorkerProof(msgspec.Struct, frozen=True):
    """The result of a worker's checks of its model, made once the model was loaded."""

    rank: int
    support: ModelSupport
    weights: str = ""
    rotary: str = ""


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler before vLLM is ready."""

    proof: WorkerProof


def _severity(result: LoadResult) -> tuple[bool, bool]:
    """How much a rank's result tells: an error more than success, and the rank that failed more than the others."""
    return bool(result.error), not result.another_failed


@dataclass(kw_only=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """A worker's message to the scheduler; vLLM aggregates the reports of all ranks of a step."""

    loads: dict[str, LoadResult] = field(default_factory=dict)
    repairs: dict[str, RepairResult] = field(default_factory=dict)
    """The first rank's: it has the model's predictions."""
    repaired: int = 0
    """How many computations of repairs have ended, on the first rank: ranks compute together."""
    margins: dict[str, float] = field(default_factory=dict)
    """The least margins of tokens that the model was in doubt about, or nearly, and that were not held; the first
    rank's."""
    saved_tokens: int = 0
    failed_saves: dict[str, int] = field(default_factory=dict)
    """The number of failed saves, by reason."""
    committed_ranks: dict[str, int] = field(default_factory=dict)
    """For requests that have ended: the number of ranks on which every commit is done."""
    opened: int = 0
    """The number of ranks whose first attempt to reach the hub and to pin its arena ended in this step."""
    save_seconds: tuple[float, ...] = ()
    """The seconds of each save that was committed since the last report."""
    adapters: dict[int, dict[int, LoadedAdapter]] = field(default_factory=dict)
    """All LoRA adapters of the ranks on which these have changed, by rank and by id."""
    proofs: dict[int, WorkerProof] = field(default_factory=dict)
    """The proofs of the ranks whose first report this is."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        loads = dict(self.loads)
        for request, result in other.loads.items():
            loads[request] = max(loads.get(request, result), result, key=_severity)
        # Every rank saves its shard of the same tokens.
        saved_tokens = max(self.saved_tokens, other.saved_tokens)
        return WorkerReport(
            loads=loads,
            repairs=self.repairs | other.repairs,
            repaired=self.repaired + other.repaired,
            margins=self.margins | other.margins,
            saved_tokens=saved_tokens,
            failed_saves=Counter(self.failed_saves) + Counter(other.failed_saves),
            committed_ranks=Counter(self.committed_ranks) + Counter(other.committed_ranks),
            opened=self.opened + other.opened,
            save_seconds=max(self.save_seconds, other.save_seconds, key=sum),
            adapters=self.adapters | other.adapters,
            proofs=self.proofs | other.proofs,
        )
