"""The record of one request: all that the scheduler knows of it."""

from collections.abc import Iterable, Iterator
from enum import Enum, auto

import msgspec
import numpy as np
from vllm.v1.request import Request

from blendhub.core.layout import Variant
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span, total
from blendhub.core.tokens import Tokens
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import Adapter, LoadResult
from blendhub.vllm.scheduler.request.blocks import RequestBlocks, Tables
from blendhub.vllm.scheduler.request.hashes import RequestHashes
from blendhub.vllm.scheduler.request.kv import RequestKV
from blendhub.vllm.scheduler.request.repair import RequestRepair
from blendhub.vllm.scheduler.request.reuse import Reuse, Stage
from blendhub.vllm.scheduler.request.saves import RequestSaves
from blendhub.vllm.scheduler.request.terms import Terms, text_end


class Ending(Enum):
    """What is left to do of a request that has ended; each comes after the one before, if at all."""

    LOADING = auto()
    """The workers stop a load."""
    REPAIRING = auto()
    SAVING = auto()
    """Saves that no plan has named yet wait for slots. vLLM keeps the blocks."""
    COMMITTING = auto()
    """A plan has said that no saves follow, and the workers have yet to commit all."""


class ServedRequest:
    def __init__(self, request: Request, terms: Terms, block_size: int) -> None:
        """``block_size``: the tokens that each of vLLM's block hashes stands for."""
        self.request = request
        self.terms = terms
        self.hashes = RequestHashes(request, block_size)
        self.kv = RequestKV()
        self.reuse = Reuse()
        self.blocks = RequestBlocks()
        self.repair = RequestRepair()
        end = text_end(request)
        self.has_media = end is not None
        """Whether the prompt has images, sound or video."""
        self._prompt = np.asarray(request.prompt_token_ids or (), np.uint32)[:end]
        self.saves = RequestSaves()
        self.lacks_first_token = False
        """Whether vLLM has begun it, and its first token is still to be timed."""
        self.ending: Ending | None = None
        self.ended_at = 0.0
        self.uncommitted_ranks = 0

    # Transitions that concern several parts.

    def allocated(self) -> None:
        """vLLM has allocated blocks, and found a prefix of ``engine_tokens`` in its own cache."""
        assert not self.blocks.are_allocated
        self.blocks.are_allocated = True
        settled, engine_tokens = self.hashes.settled, self.blocks.engine_tokens
        if settled and engine_tokens > settled.first_approximate:
            self.blocks.settled = Span(settled.first_approximate, engine_tokens)
            self.kv.came(self.blocks.settled, Provenance("blended", settled.ratio))
        # Another connector loads what another engine has computed, and perhaps blended.
        received_from, n_prompt = self.terms.received_from, self.request.num_prompt_tokens
        if received_from is not None and received_from < n_prompt:
            received = Span(max(received_from, engine_tokens), n_prompt)
            self.kv.came(received, Provenance("by_other", 0.0))
            self.hashes.salt(received.start, engine_tokens)

    def begin_load(self, decision: Decision) -> None:
        """The workers load what was decided, into blocks that vLLM has allocated."""
        self.kv.begin_load(decision)
        self.saves.map_ends = set()  # the maps of segments are made anew
        if decision.first_approximate is not None:
            self.repair.outcome = None  # of before it was preempted
            self.hashes.salt(decision.first_approximate, self.blocks.engine_tokens)

    def end_load(self, result: LoadResult) -> None:
        self.reuse.end_load(result)
        if result.error:
            self.kv.load_failed()
        stats, loaded = self.request.prefill_stats, self.reuse.loaded
        if stats and not self.request.num_preemptions:
            # vLLM counts all that was claimed as cached, with what was computed to blend it.
            kept = [*loaded.exact, *loaded.settled, *loaded.moved] if loaded else []
            stats.set(
                self.request.num_prompt_tokens,
                self.blocks.engine_tokens,
                max(0, total(kept) - total(result.recomputed)),
            )

    def loaded_by_other(self, span: Span, *, is_whole: bool) -> None:
        """Another connector has loaded this span, ``is_whole``: with the KV of all of its tokens. What is approximate
        of it, or lacks KV, is not stored again."""
        first = self.first_approximate
        if not is_whole:
            self.kv.lacks(span)
        elif first is not None and first < span.end:
            self.kv.came(Span(max(first, span.start), span.end), Provenance("by_other"))

    def identify(self, adapter: Adapter) -> None:
        """Keep the request's adapter, which the workers have reported."""
        variant = Variant(adapter.weights, self.terms.variant.cache_salt)
        self.terms = msgspec.structs.replace(self.terms, adapter=adapter, variant=variant)

    def end(self, ending: Ending, now: float, tables: Tables | None = None, ranks: int = 0) -> None:
        """vLLM has ended the request. ``tables``: its blocks, which vLLM keeps until ``ranks`` workers need them no
        more."""
        self.ending, self.ended_at = ending, now
        self.blocks.kept, self.uncommitted_ranks = tables, ranks

    # What follows from it.

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def lacks_adapter(self) -> bool:
        """Whether it has a LoRA adapter that the workers have not reported."""
        return self.request.lora_request is not None and self.terms.adapter is None

    @property
    def can_blend(self) -> bool:
        """Whether text may be moved, and the hashes of its blocks be salted: a prompt shorter than a block has none."""
        return self.terms.moves and bool(self.request.block_hashes)

    @property
    def is_repairable(self) -> bool:
        """Whether approximate KV of the request can be computed anew, and found under the hashes of exact KV then."""
        return self.terms.repairable and not self.has_media and bool(self.request.block_hashes)

    @property
    def first_approximate(self) -> int | None:
        """The position from which on KV differs from what the model alone computes; None if it differs nowhere."""
        return self.kv.first_approximate

    @property
    def reused_end(self) -> int:
        """The end of what vLLM's own cache had, or BlendHub has loaded."""
        loaded = self.reuse.loaded
        return max(self.blocks.engine_tokens, loaded.end if loaded else 0)

    @property
    def computed_end(self) -> int:
        """The end of the tokens whose KV earlier steps have computed, as far as the tokens are known."""
        return min(self.request.num_computed_tokens, self.request.num_tokens)

    @property
    def left_to_engine(self) -> int:
        """The tokens that vLLM has still to compute, once it has allocated blocks for them."""
        if not self.blocks.are_allocated or self.reuse.stage not in (Stage.COMPUTING, Stage.LOADED):
            return 0
        return max(0, self.request.num_tokens - max(self.request.num_computed_tokens, self.blocks.engine_tokens))

    @property
    def reused(self) -> str:
        """What kind of KV the request has loaded: none, exact, or blended."""
        loaded = self.reuse.loaded
        if self.blocks.settled or (loaded and loaded.first_approximate is not None):
            return "blended"
        return "exact" if loaded and loaded.matches else "none"

    @property
    def has_begun_to_answer(self) -> bool:
        """Whether it has generated tokens; if it was preempted, vLLM may compute its prompt once more."""
        return len(self.request.output_token_ids) > 0

    @property
    def is_answering(self) -> bool:
        """Whether steps compute its answer, and nothing else of it."""
        return self.has_begun_to_answer and self.request.num_computed_tokens >= self.request.num_tokens - 1

    def needs_steps(self, saves_answers: bool) -> bool:
        """Whether something of it is under way that steps have to look at, besides what vLLM does.

        ``saves_answers``: whether its answer is stored while it is written.
        """
        reuse, saves = self.reuse, self.saves
        is_stored = not self.terms.stores or not self.blocks.are_allocated or (saves.is_done and not saves_answers)
        return (
            reuse.stage is Stage.LOADING
            or (reuse.lookup is not None and not reuse.lookup.done())
            or self.blocks.held is not None
            or not is_stored
            or self.repair.progress is not None
            or (self.lacks_first_token and not self.has_begun_to_answer)
        )

    @property
    def prompt_end(self) -> int:
        """The end of the part of the prompt whose KV is found and stored: all, or the text before the first image."""
        return len(self._prompt)

    def tokens(self) -> Tokens:
        """The prompt, and the tokens generated until now; or the text before the first image, sound or video."""
        answer = () if self.has_media else self.request.output_token_ids
        return np.concatenate([self._prompt, np.asarray(answer, np.uint32)]) if len(answer) else self._prompt


class Requests:
    """The records of all requests."""

    def __init__(self) -> None:
        self.known: dict[str, ServedRequest] = {}
        """Those that vLLM has not ended."""
        self.busy: dict[str, ServedRequest] = {}
        """Those of them that need steps, or of which vLLM has asked in this one. Steps look at no others: an engine
        may answer a thousand requests at a time."""
        self.ended: dict[str, ServedRequest] = {}
        """Those that vLLM has ended, and of which something is left to do."""

    def __iter__(self) -> Iterator[ServedRequest]:
        """All that steps look at."""
        yield from self.busy.values()
        yield from self.ended.values()

    def end_step(self, *, saves_answers: bool) -> None:
        """A step is planned, and has looked at the busy ones."""
        for name in [name for name, request in self.busy.items() if not request.needs_steps(saves_answers)]:
            del self.busy[name]

    def get(self, name: str) -> ServedRequest | None:
        """A request that vLLM has not ended, and of which it asks something now."""
        request = self.known.get(name)
        if request:
            self.busy[name] = request
        return request

    def add(self, request: ServedRequest) -> None:
        self.known[request.id] = self.busy[request.id] = request

    def end(self, name: str) -> ServedRequest | None:
        """A request that vLLM ends now."""
        self.busy.pop(name, None)
        return self.known.pop(name, None)

    def running(self, names: Iterable[str]) -> Iterator[ServedRequest]:
        """Those of these names that vLLM has not ended."""
        return (self.known[name] for name in names if name in self.known)

    def loading(self, name: str) -> ServedRequest | None:
        """The request of this name whose KV is being loaded; it may have ended."""
        for request in (self.ended.get(name), self.known.get(name)):
            if request and request.reuse.stage is Stage.LOADING:
                return request
        return None
