"""The scheduler's state of one request, from its arrival to its end."""

import time
from collections.abc import Iterator
from enum import Enum, auto

import msgspec
import numpy as np
from vllm.v1.request import Request

from blendhub.client.hub_client import PendingLookup
from blendhub.client.wire import Found
from blendhub.core.layout import Variant
from blendhub.core.spans import Match, Span, join_spans, total
from blendhub.core.tokens import Tokens
from blendhub.outcome.reasons import NotReused, Why
from blendhub.outcome.report import AuditOutcome, Outcome, RepairOutcome, ReusedSpans
from blendhub.vllm.decision import Choice, Decision, Refusal
from blendhub.vllm.messages import Adapter, LoadResult
from blendhub.vllm.scheduler.admission import Terms, text_end
from blendhub.vllm.scheduler.blocks.hashes import RequestHashes, Settled
from blendhub.vllm.scheduler.blocks.request_blocks import RequestBlocks, Tables

MOST_TAKES = 8
"""How often a request may wait for a later step, so that vLLM looks into its cache for what others have blended."""


class Stage(Enum):
    """How far the reuse of stored KV has come. ``RequestState`` alone changes it."""

    LOOKING_UP = auto()
    """The hub has not answered the lookup yet."""
    FOUND = auto()
    """The hub has answered; vLLM has not allocated blocks yet."""
    LOADING = auto()
    """The workers load and recompute."""
    LOADED = auto()
    COMPUTING = auto()
    """vLLM computes what it lacks: reuse was refused, or the load failed."""


class RequestState:
    """One request of the engine.

    ::

        LOOKING_UP --answered--> FOUND --begin_load--> LOADING --end_load--> LOADED or COMPUTING

    ``look_up`` begins anew, unless the request is loading; ``refuse`` ends in COMPUTING from wherever it is called.
    """

    def __init__(self, request: Request, terms: Terms) -> None:
        self.request = request
        self.terms = terms
        self.stage = Stage.COMPUTING
        self.lookup: PendingLookup | None = None
        """Its lease is held until a load takes it over, or the request needs it no more."""
        self.found: Found | None = None
        """The answer to the last lookup. It outlives the lease: what is stored need not be stored again."""
        self.choice: Choice | None = None
        """The part of ``found`` that is being loaded, or was loaded, and why it is no more."""
        self.result: LoadResult | None = None
        self.refusal: Refusal | None = None
        """Why nothing is reused."""
        self.had_its_turn = False
        """Whether vLLM has asked for the request."""
        self.is_sample = False
        """Whether its audit stands for all requests: true if the engine chose the request, false if its client did."""
        self.is_audited = False
        self.audit: AuditOutcome | None = None
        """The outcome of the audit. No request is audited twice."""
        self.repair: RepairOutcome | None = None
        self._is_repaired = False
        """Whether all approximate KV was computed anew since the last load."""
        self.engine_tokens = 0
        """The length of vLLM's own cached prefix when the request was scheduled last."""
        self.hashes = RequestHashes(request)
        self.is_scheduled = False
        """Whether vLLM has allocated blocks; afterwards its hashes are only salted."""
        self.settled_span: Span | None = None
        """The span that the request took of blended blocks in vLLM's own cache."""
        self.ratio = 1.0
        """The least share of moved text that was recomputed in the request's KV."""
        self.shown_exact = 0
        """The number of tokens whose own block hashes other connectors have seen."""
        self.loaded_by_other: Span | None = None
        """The span that another connector has loaded and that is not stored again: it is approximate, or lacks KV."""
        self._settled: Settled | None = None
        """The blended prefix whose blocks vLLM looks for."""
        self._takes = 0
        self._approximate_before: int | None = None
        """``first_approximate`` of what vLLM's own cache had, and of earlier loads: a preempted request may keep
        blended blocks."""
        end = text_end(request)
        self.has_media = end is not None
        """Whether the prompt has images, sound or video."""
        self._prompt = np.asarray(request.prompt_token_ids or (), np.uint32)[:end]

    # Transitions.

    def take(self, settled: Settled | None) -> bool:
        """Have vLLM look for these blended blocks, or for none; returns whether it looked for others until now."""
        assert not self.is_scheduled
        if settled == self._settled or self._takes >= MOST_TAKES:
            return False
        self._takes += 1
        self._settled = settled
        self.hashes.take(settled)
        return True

    def scheduled(self) -> None:
        """Note that vLLM has allocated blocks, and found a prefix of ``engine_tokens`` in its own cache."""
        assert not self.is_scheduled
        settled = self._settled
        if settled and self.engine_tokens > settled.first_approximate:
            self.settled_span = Span(settled.first_approximate, self.engine_tokens)
            self.ratio = settled.ratio
            self._approximate_before = settled.first_approximate
        self.is_scheduled = True

    def salt(self, first_approximate: int, block_size: int) -> None:
        """Make the block hashes unique from this position on."""
        # With one group of blocks, vLLM hashes whole blocks, whatever ``hash_block_size`` says.
        self.hashes.salt(first_approximate, block_size, self.engine_tokens // block_size)

    def receive(self, block_size: int) -> None:
        """Note that another connector loads what another engine has computed, and in which part that was blended."""
        received_from = self.terms.received_from
        if received_from is not None and received_from < self.request.num_prompt_tokens:
            self._approximate_before, self.ratio = max(received_from, self.engine_tokens), 0.0
            self.salt(self._approximate_before, block_size)

    def note_loaded_by_other(self, span: Span, *, is_whole: bool) -> None:
        """Note that another connector has loaded this span, ``is_whole``: with the KV of all of its tokens."""
        first = self.first_approximate if is_whole else span.start
        if first is not None and first < span.end:
            self.loaded_by_other = Span(max(first, span.start), span.end)

    def look_up(self) -> None:
        assert self.stage is not Stage.LOADING
        self._approximate_before = self.first_approximate
        self.end_lookup()
        self.found = self.choice = self.result = self.repair = None
        self._is_repaired = False
        self.stage = Stage.LOOKING_UP

    def answered(self, found: Found) -> None:
        assert self.stage is Stage.LOOKING_UP
        self.found, self.stage = found, Stage.FOUND

    def decided(self, choice: Choice) -> None:
        """Keep a choice. May be called again: vLLM asks in each step until it can allocate."""
        assert self.stage is Stage.FOUND
        self.choice = choice

    def begin_load(self) -> PendingLookup:
        """Returns the lookup, whose lease the load uses from now on."""
        assert self.stage is Stage.FOUND and self.decision and self.lookup
        lookup, self.lookup, self.stage = self.lookup, None, Stage.LOADING
        return lookup

    def end_load(self, result: LoadResult) -> None:
        assert self.stage is Stage.LOADING
        self.result = result
        self.stage = Stage.COMPUTING if result.error else Stage.LOADED
        loaded = self.decision if self.stage is Stage.LOADED else None
        if loaded and loaded.first_approximate is not None:
            self.ratio = min(self.ratio, loaded.ratio)
        stats = self.request.prefill_stats
        if stats and not self.request.num_preemptions:
            # vLLM counts all that was claimed as cached, with what was computed to blend it.
            kept = [*loaded.exact, *loaded.settled, *loaded.moved] if loaded else []
            stats.set(
                self.request.num_prompt_tokens, self.engine_tokens, max(0, total(kept) - total(result.recomputed))
            )

    def refuse(self, refusal: Refusal) -> None:
        assert self.stage is not Stage.LOADING
        self._approximate_before = self.first_approximate
        self.refusal, self.stage = refusal, Stage.COMPUTING
        self.end_lookup()

    def repaired(self, blocks: RequestBlocks, tables: Tables, end: int) -> None:
        """Note that all KV before ``end`` is what the model alone computes: vLLM finds its blocks as such."""
        first = self.first_approximate
        assert first is not None
        self._is_repaired, self._approximate_before = True, None
        self.shown_exact = max(self.shown_exact, self.request.num_tokens)
        self.hashes.restore()
        blocks.cache_anew(self.request, tables, first, end)

    def end_lookup(self) -> None:
        """End the lease that the lookup brought, or still brings."""
        lookup, self.lookup = self.lookup, None
        if lookup:
            lookup.close()

    def identify(self, adapter: Adapter) -> None:
        """Keep the request's adapter, which the workers have reported."""
        variant = Variant(adapter.weights, self.terms.variant.cache_salt)
        self.terms = msgspec.structs.replace(self.terms, adapter=adapter, variant=variant)

    # What follows from it.

    @property
    def decision(self) -> Decision | None:
        """The decision about what is being loaded, or was loaded."""
        return self.choice.decision if self.choice else None

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
    def matches(self) -> tuple[Match, ...]:
        """The matches of the last lookup, which may be loaded."""
        return self.found.matches if self.found else ()

    @property
    def first_approximate(self) -> int | None:
        """The position from which on KV differs from what the model alone computes; None if it differs nowhere."""
        firsts = [self._approximate_before]
        if self.decision and self.stage in (Stage.LOADING, Stage.LOADED) and not self._is_repaired:
            firsts.append(self.decision.first_approximate)
        return min((first for first in firsts if first is not None), default=None)

    @property
    def blended(self) -> Span | None:
        """The span that may be stored as blended: from the first approximate token to the last one that was blended."""
        first = self.first_approximate
        ends = [self.settled_span.end] if self.settled_span else []
        if self.decision and self.stage is Stage.LOADED:
            ends += [span.end for span in [*self.decision.moved, *self.decision.settled]]
        return Span(first, max(ends)) if first is not None and ends and max(ends) > first else None

    @property
    def reused_end(self) -> int:
        """The end of what vLLM's own cache had, or BlendHub has loaded."""
        loaded = self.decision if self.stage is Stage.LOADED else None
        return max(self.engine_tokens, loaded.end if loaded else 0)

    @property
    def left_to_engine(self) -> int:
        """The tokens that vLLM has still to compute, once it has allocated blocks for them."""
        if not self.is_scheduled or self.stage not in (Stage.COMPUTING, Stage.LOADED):
            return 0
        return max(0, self.request.num_tokens - max(self.request.num_computed_tokens, self.engine_tokens))

    @property
    def reuse(self) -> str:
        """What kind of KV the request has loaded: none, exact, or blended."""
        loaded = self.decision if self.stage is Stage.LOADED else None
        if self.settled_span or (loaded and loaded.first_approximate is not None):
            return "blended"
        return "exact" if loaded else "none"

    @property
    def has_begun_to_answer(self) -> bool:
        """Whether it has generated tokens; if it was preempted, vLLM may compute its prompt once more."""
        return len(self.request.output_token_ids) > 0

    @property
    def is_answering(self) -> bool:
        """Whether steps compute its answer, and nothing else of it."""
        return self.has_begun_to_answer and self.request.num_computed_tokens >= self.request.num_tokens - 1

    @property
    def prompt_end(self) -> int:
        """The end of the part of the prompt whose KV is found and stored: all, or the text before the first image."""
        return len(self._prompt)

    def tokens(self) -> Tokens:
        """The prompt, and the tokens generated until now; or the text before the first image, sound or video."""
        answer = () if self.has_media else self.request.output_token_ids
        return np.concatenate([self._prompt, np.asarray(answer, np.uint32)]) if len(answer) else self._prompt

    def outcome(self) -> Outcome:
        """What became of the request until now."""
        loaded, result = None, self.result or LoadResult()
        if self.result and not result.error:
            loaded = self.decision
        n_tokens = self.request.num_prompt_tokens
        settled = [*([self.settled_span] if self.settled_span else []), *(loaded.settled if loaded else [])]
        return Outcome(
            request=self.id,
            prompt_tokens=n_tokens,
            engine_tokens=self.engine_tokens,
            spans=ReusedSpans(
                exact=tuple(loaded.exact if loaded else ()),
                settled=tuple(join_spans(settled)),
                moved=tuple(loaded.moved if loaded else ()),
                recomputed=result.recomputed,
                holes=tuple(loaded.holes if loaded else ()),
            ),
            sources=loaded.sources if loaded else (),
            unused=tuple(self._unused(is_loaded=loaded is not None)),
            reason=result.error or self._reason(loaded),
            audit=self.audit,
            repair=self.repair,
            is_sample=self.is_sample,
            approximate_from=self.first_approximate,
            ended_at=time.time(),
        )

    def _reason(self, loaded: Decision | None) -> str | None:
        if self.refusal and not loaded:
            return self.refusal.reason
        return self.choice.refusal.reason if self.choice and self.choice.refusal else None

    def _unused(self, *, is_loaded: bool) -> Iterator[NotReused]:
        """Why tokens are not reused, if they are not; of spans that overlap, the later one counts."""
        why = Why.FAILED if self.result and self.result.error else self.refusal.why if self.refusal else Why.ENDED
        if self.found is None:
            yield NotReused(Span(0, self.request.num_prompt_tokens), why)
            return
        yield NotReused(Span(0, self.prompt_end), Why.NOTHING_STORED)
        if self.has_media:
            yield NotReused(Span(self.prompt_end, self.request.num_prompt_tokens), Why.REQUEST)
        yield from (NotReused(span, Why.ON_THE_WAY) for span in self.found.on_the_way)
        if not is_loaded:
            yield from (NotReused(match.span, why) for match in self.found.matches)
        yield from self.choice.unused if self.choice else ()
