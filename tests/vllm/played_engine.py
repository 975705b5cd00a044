"""The connector's scheduler side on a real hub with vLLM's own requests; tests play vLLM and the worker."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from blendhub import PluginHost
from blendhub.client.answer import expecting
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import HubStats, Stats
from blendhub.core.errors import LeaseError
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Span
from blendhub.framework.observers import Observers
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm.hub_client import join_hub
from blendhub.vllm.messages import DoubtJob, HubAddress, HubPlace, LoadJob, LoadResult, RepairJob, WorkerReport
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.plugin import register
from blendhub.vllm.scheduler import loads, saves
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.blocks.block_tables import BlockTables
from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks
from blendhub.vllm.scheduler.connector_scheduler import ConnectorScheduler
from blendhub.vllm.scheduler.outcomes import outcome_of
from blendhub.vllm.scheduler.request.blocks import Tables
from blendhub.vllm.scheduler.startup import StartupFacts
from blendhub.vllm.settings import ReusePolicy, Settings
from harness.waiting import wait_until

register()
init_none_hash(sha256)
BLOCK = 16
HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=32)
NAMESPACE = Namespace(model="m", layout=LAYOUT)
SETTINGS = Settings(repair="off", recompute_ratio=0.15, policy=ReusePolicy(min_reused_tokens=16, min_donor_context=0))
SUPPORT = ModelSupport((LAYOUT,), True, ())
FACTS = StartupFacts(
    settings=SETTINGS, support=SUPPORT, role="kv_both", max_model_len=4096, namespace=NAMESPACE, finds_prefixes=True
)
TEXT = np.random.default_rng(1).permutation(60_000).tolist()

# The hub's answers are waited for however busy the machine is, and short texts are stored.
loads.LOOKUP_WAIT_S = 1.0
saves.MIN_SAVED_TOKENS = 1  # type: ignore[attr-defined]

ONE_TABLE = BlockTables((BLOCK,), (None,))


def text(number: int, length: int) -> list[int]:
    """Tokens that no other text has."""
    return TEXT[1000 * number : 1000 * number + length]


class PlayedBlocks(EngineBlocks):
    """The blocks of every request are the same. Unless a test says otherwise, vLLM has cached all that was blended."""

    hash_block_size = BLOCK

    def __init__(self, tables: BlockTables) -> None:
        super().__init__(tables)
        self.blocks = list(range(1, 101))
        self.n_free = 90
        self.lent: list[Any] = []
        self.cached_anew: dict[str, Span] = {}
        self.own: set[BlockHash] = set()
        self.kept: dict[BlockHash, Any] = {}
        """The blocks that vLLM's cache has, by their hashes."""
        self.cached = lambda hashes, most: 0 if self.own.issuperset(hashes) else min(most, BLOCK * len(hashes))

    def of(self, request: str) -> Tables:
        return (self.blocks,)

    @property
    def pool(self) -> Any:
        return SimpleNamespace(
            num_gpu_blocks=100,
            get_num_free_blocks=lambda: self.n_free - self.n_lent,
            get_new_blocks=self._lend,
            touch=lambda blocks: self._count(blocks, 1),
            free_blocks=lambda blocks: self._count(blocks, -1),
        )

    @property
    def n_lent(self) -> int:
        return sum(block.ref_cnt for block in self.lent)

    def _lend(self, n: int) -> list[Any]:
        lent = [SimpleNamespace(block_id=200 + number, ref_cnt=1) for number in range(n)]
        self.lent += lent
        return lent

    def _count(self, blocks: Iterable[Any], change: int) -> None:
        for block in blocks:
            block.ref_cnt += change

    def cached_block(self, table: int, block_hash: BlockHash) -> Any:
        return self.kept.get(block_hash)

    def holding(self, request: str, span: Span) -> Iterator[int]:
        return iter(self.blocks[span.start // BLOCK : -(-span.end // BLOCK)])

    def cache_anew(self, request: Request, tables: Tables, start: int, end: int) -> None:
        self.cached_anew[request.request_id] = Span(start, end)

    def cached_tokens(self, hashes: Sequence[BlockHash], most: int) -> int:
        return self.cached(hashes, most)


class PlayedEngine:
    """What vLLM does around the scheduler side: requests, steps, and one worker that commits every save."""

    def __init__(
        self,
        hub: HubInThread,
        address: HubAddress | None = None,
        rank: int = 0,
        settings: Settings = SETTINGS,
        tables: BlockTables = ONE_TABLE,
        namespace: Namespace = NAMESPACE,
        **support: Any,
    ) -> None:
        """``rank`` is that of its client: 0 for the worker that it plays, -1 if there is a real worker. ``support``:
        what the model supports besides.
        """
        config = VllmConfig(
            kv_transfer_config=KVTransferConfig(kv_connector="BlendHubConnector", kv_role="kv_both"),
            cache_config=CacheConfig(block_size=BLOCK),
        )
        address = address or HubAddress(hub.endpoint, hub.transport)
        self.hub, self.blocks = hub, PlayedBlocks(tables)
        place = HubPlace(address, namespace)
        client = join_hub(place, "engine", -1, HOST)
        client.reach()
        supports = msgspec.structs.replace(SUPPORT, **support)
        self.side = ConnectorScheduler(
            config,
            msgspec.structs.replace(FACTS, settings=settings, support=supports, namespace=namespace),
            Admission(config, settings, supports, namespace),
            place,
            client,
            Observers(HOST.observers()),
            self.blocks,
        )
        self.client = HubClient(address.endpoint, address.transport.name, address.transport.options, host=HOST)
        self.client.register("engine", namespace, rank)
        if rank == 0:
            self.side.process_report(WorkerReport(opened=1))
        self.saved = []
        self.loads: list[LoadJob] = []
        """What the last step has begun to load."""
        self.repair: RepairJob | None = None
        """What the last step repairs."""
        self.doubts: list[DoubtJob] = []
        """The tokens that the last step looks at."""
        self.last_report: dict[str, Any] = {}
        """What the response of the last request that was served reported."""

    @property
    def counters(self) -> Counter[str]:
        return self.side.reports.counters

    def close(self) -> None:
        self.client.close()
        self.side.client.close()

    def request(
        self,
        name: str,
        prompt: list[int],
        salt: str | None = None,
        lora: LoRARequest | None = None,
        media: list[Any] | None = None,
        **asked: Any,
    ) -> Request:
        """``media``: its images. ``asked`` is what it says to BlendHub."""
        hasher = get_request_block_hasher(BLOCK, sha256)
        sampling = SamplingParams(max_tokens=99, extra_args={"kv_transfer_params": {"blendhub": asked}})
        known: dict[str, Any] = {"cache_salt": salt, "block_hasher": hasher, "lora_request": lora, "mm_features": media}
        request = Request(name, prompt, sampling, None, **known)
        self.blocks.own.update(request.block_hashes)
        return request

    def arrived(self, name: str, prompt: list[int], **asked: Any) -> Request:
        """A request of which the scheduler side has heard."""
        request = self.request(name, prompt, **asked)
        self.side.arrived(request)
        return request

    def settle(self) -> None:
        """Until the hub has answered all that the scheduler side asked."""
        for request in (*self.side.requests.known.values(), *self.side.requests.ended.values()):
            assert all(answer.done(10) for answer in request.saves.reservations)
        answer = self.side.client._ask(expecting(HubStats), Stats(), probing=True)
        assert answer.done(10)
        self.eventually(lambda: not self.side.client.is_clearing)

    def step(self, **computed: tuple[int, int]) -> list:
        """A step that computes so many tokens of these requests after so many; returns what has to be saved."""
        output = SchedulerOutput.make_empty()
        for name, (before, n_scheduled) in computed.items():
            self.side.requests.known[name].request.num_computed_tokens = before
            output.num_scheduled_tokens[name] = n_scheduled
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        plan = self.side.plan(output)
        self.repair, self.doubts = plan.repair, plan.doubts
        self.loads, self.ending = plan.loads, plan.ending
        self.settle()
        for job in plan.saves:
            with suppress(LeaseError):  # another engine has cleared its namespaces
                self.client.commit(job.right, job.slot.span.end).result()
                self.saved.append(job)
        return plan.saves

    def turn(self, request: Request, local: int = 0) -> tuple[int | None, bool]:
        """What vLLM hears when the request has its turn, in a step of its own."""
        self.side.loads._waits_until = 0.0
        return self.side.matched(request, local)

    def load(self, request: Request, local: int = 0, error: str = "") -> int:
        """What vLLM does with a request whose turn it is; returns how far its KV is there after it."""
        n_external, _ = self.turn(request, local)
        assert n_external is not None
        self.side.allocated(request, self._tables(local + n_external), n_external)
        if n_external:
            self.step()
            for job in self.loads:
                self.client.release(job.source.lease).result()
            self.side.process_report(WorkerReport(loads={request.request_id: LoadResult(error=error)}))
        return local if error else local + n_external

    def _tables(self, n_tokens: int) -> Tables:
        return [list(range(1, 1 - (-n_tokens // size))) for size in self.blocks.tables.block_sizes]

    def end(self, request: Request, computed: int) -> None:
        """Its end, with an answer of one token where its whole prompt is computed and there is no other answer."""
        if computed >= request.num_prompt_tokens and not request.num_output_tokens:
            request.append_output_token_ids(1)
        request.num_computed_tokens = computed
        if self.side.ended(request, self._tables(computed))[0]:
            while request.request_id not in self.ending:
                self.step()
            self.side.process_report(WorkerReport(committed_ranks={request.request_id: 1}))
        self.settle()

    def serve(self, name: str, prompt: list[int], salt: str | None = None, **asked: Any) -> int:
        """A request from its arrival to its end; returns how many of its tokens were reused."""
        request = self.arrived(name, prompt, salt=salt, **asked)
        there = self.load(request)
        self.step(**{name: (there, len(prompt) - there)})
        self.last_report = self.report(name)
        self.end(request, len(prompt))
        return there

    def report(self, name: str) -> dict[str, Any]:
        """What the response of a request would report now."""
        state = self.side.requests.known[name]
        return outcome_of(state).response(explains=state.terms.explains)

    def found(self, tokens: list[int], *, exact: bool) -> set[int]:
        matches = self.client.lookup(np.asarray(tokens, np.uint32), acquire=False).result().matches
        return {p for match in matches if match.exact is exact for p in range(match.span.start, match.span.end)}

    def gauge(self, name: str) -> float:
        return self.client.stats().result().gauges[name]

    def leases(self) -> float:
        """How many rights to read and to write there are."""
        return self.gauge("read_leases") + self.gauge("write_leases")

    def eventually(self, what: Callable[[], bool]) -> None:
        wait_until(what, 10.0, 0.005)


@contextmanager
def played_engine(arena_gib: float = 0.01, **options: Any) -> Iterator[PlayedEngine]:
    """An engine with an embedded hub."""
    with HubInThread(HubConfig(arena_gib=arena_gib, metrics=""), HOST) as hub:
        engine = PlayedEngine(hub, **options)
        yield engine
        engine.close()
