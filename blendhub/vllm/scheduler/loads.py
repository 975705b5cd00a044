"""Scheduler side of loading: looks up what the hub has, decides what each request reuses of it, and plans the loads."""

import math
import time
from collections import deque

import numpy as np
from msgspec.structs import replace
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.client.answer import Answer
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import Found
from blendhub.core.errors import BlendHubError, DeadlineExceeded
from blendhub.core.spans import Span
from blendhub.outcome.reasons import Why
from blendhub.vllm.decision import Choice, Decision, Refusal
from blendhub.vllm.messages import NULL_BLOCK, LoadJob, LoadResult, LoadSource, StepPlan
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.blend_queue import BlendQueue
from blendhub.vllm.scheduler.blocks.donor_blocks import RunName
from blendhub.vllm.scheduler.blocks.scratch import Borrowed, Scratch
from blendhub.vllm.scheduler.blocks.settled_blocks import SettledBlocks
from blendhub.vllm.scheduler.decide import Limits, decide
from blendhub.vllm.scheduler.reports import Reports
from blendhub.vllm.scheduler.request.blocks import Tables
from blendhub.vllm.scheduler.request.reuse import Stage
from blendhub.vllm.scheduler.request.served_request import Requests, ServedRequest
from blendhub.vllm.scheduler.segments import segments_to_make
from blendhub.vllm.scheduler.side import Matched
from blendhub.vllm.scheduler.startup import StartupFacts

LOOKUP_WAIT_S, LOOKUP_WAIT_SHARE = 0.002, 0.1
"""How long a step waits for answers of the hub, for all requests together, before vLLM goes on to others: this, or this
share of the least forward, if that is longer. A request without an answer waits for a whole step.
"""

STORE_SHARE = 0.8
"""The share of a lookup's timeout that the hub may spend on reading matches from its store."""

ASK_AGAIN: Matched = None, False
"""vLLM asks for the request again in a later step."""


class LoadScheduler:
    """All methods are called by the scheduler's thread. Only ``matched`` waits, at most ``wait_left_s`` a step."""

    def __init__(
        self,
        facts: StartupFacts,
        client: HubClient,
        requests: Requests,
        admission: Admission,
        scratch: Scratch,
        queue: BlendQueue,
        reports: Reports,
    ) -> None:
        self._client = client
        self._requests = requests
        self._admission = admission
        self._scratch = scratch
        self._queue = queue
        self._reports = reports
        self._settled = SettledBlocks(scratch.blocks)
        self._settings = facts.settings
        self._costs = facts.support.costs if facts.settings.policy.min_reused_tokens is None else None
        space = facts.namespace
        self._map_tokens = space.moves_states and space.state_bytes * space.chunk_tokens / space.shard_bytes
        """The tokens whose KV takes as much as the map of a text, at most: as a state, in numbers of half the width for
        what is kept and what is added. 0: text moves without maps."""
        self._n_positions = facts.max_model_len
        """Keys that were stored for this position or a later one cannot be moved: tables of rotations are as long."""
        self._looks_ahead = facts.looks_ahead
        self._shows_hashes = facts.support.shows_hashes
        """Whether another connector, which vLLM asks next, may keep a request's block hashes.

        Then hashes are salted with the decision to blend, and not only when vLLM has allocated blocks; and no request
        blends what was shown under its own hashes.
        """
        self._waits_until = 0.0
        """When this step ceases to wait for the hub; 0: it has not begun to wait."""
        self._begun_at = time.monotonic()
        self._steps_s = deque([0.0], maxlen=8)
        """How long the last steps took. The shortest has computed no prompt, or as little as those now."""

    def arrived(self, request: ServedRequest) -> None:
        """Look up a request long before vLLM schedules it. What fails now is tried again then."""
        self._settled.look_for(request)
        if not request.reuse.refusal:
            self._look_up(request)

    @property
    def wait_left_s(self) -> float:
        """How long this step may still wait for the hub: many requests that wait must not hold up those that run."""
        if not self._waits_until:
            least_s = self._costs.prefill.seconds(0) if self._costs else 0.0
            self._waits_until = time.monotonic() + max(LOOKUP_WAIT_S, LOOKUP_WAIT_SHARE * least_s)
        return max(0.0, self._waits_until - time.monotonic())

    def matched(self, request: ServedRequest, local: int) -> Matched:
        """The number of tokens after the first ``local`` that are loaded."""
        # While it waited, other requests have settled what it repeats, or vLLM has evicted that.
        # Other connectors may have kept the hashes that they have seen.
        is_open = not request.blocks.are_allocated and not request.hashes.n_shown
        if is_open and self._settled.look_for(request):
            return ASK_AGAIN  # vLLM has to look into its cache for others
        request.blocks.engine_tokens = local
        if not self._is_decided(request, local):
            return ASK_AGAIN
        self._note_where_others_left(request)
        decision = request.reuse.decision if request.reuse.stage is Stage.FOUND else None
        if not decision and self._queue.must_wait(request.request, request.request.num_tokens - local):
            return ASK_AGAIN
        if self._shows_hashes:
            request.hashes.show(decision.first_approximate if decision else None, local)
        return (decision.end - local, True) if decision else (0, False)

    def allocated(self, request: ServedRequest, tables: Tables, n_external: int) -> LoadJob | None:
        """vLLM has allocated blocks for the tokens that ``matched`` returned; returns the load, if any."""
        if not request.blocks.are_allocated:
            request.allocated()
            self._queue.allocated(request)
            self._reports.counters["tokens_settled"] += len(request.blocks.settled or ())
        decision = request.reuse.decision
        if decision is None:
            return None
        if not n_external:
            if request.reuse.stage is Stage.FOUND:
                self._reports.refuse(request, Refusal(Why.OTHER_CONNECTOR, Why.OTHER_CONNECTOR.message))
            return None
        claimed = decision.end - request.blocks.engine_tokens
        assert n_external == claimed, f"vLLM takes {n_external} of the {claimed} tokens that BlendHub has claimed"
        lookup = request.reuse.begin_load()
        assert lookup.reply and (lookup.reply.lease is not None or not decision.matches)
        self._scratch.allocated(request.blocks)
        tables, of_states = self._scratch.complete(request.blocks, tables), self._scratch.tables.of_states
        blocks = [np.asarray(table, np.int64) for table in tables]
        state = lookup.reply.state if decision.exact else None
        for table in of_states:
            # Without a state to load, the one that vLLM has is gone on from.
            ends = [decision.end] if state is not None or not decision.start else [decision.end, decision.start]
            blocks[table] = blocks[table][[(end - 1) // self._scratch.tables.block_sizes[table] for end in ends]]
            assert NULL_BLOCK not in blocks[table], "vLLM has no block for a state"
        if n_recomputed := math.ceil(decision.recomputed_at(decision.ratio)):
            self._queue.begin(request.request, n_recomputed)
        request.begin_load(decision)
        hashes = request.hashes.own()
        for match in decision.matches:
            if match.exact:
                self._scratch.donors.remember(RunName(lookup.request.epoch, match.run), match.span, hashes)
        pieces = decision.pieces_of(lookup.reply.pieces)
        return LoadJob(
            request.id,
            request.tokens(),
            tuple(blocks),
            decision,
            LoadSource(lookup.reply.lease, lookup.request.epoch, pieces, state),
            request.terms.adapter,
            self._scratch.states.borrow(request, self._scratch.least_free),
        )

    def find_donors(self, plan: StepPlan, step: SchedulerOutput) -> None:
        """Have the loads that begin in this step copy what they move from vLLM's own blocks, as far as it has them."""
        if not plan.loads:
            return
        unready: set[int] = set()
        for request in self._requests.running(step.num_scheduled_tokens):
            start = request.request.num_computed_tokens
            computed = Span(start, start + step.num_scheduled_tokens[request.id])
            unready.update(self._scratch.blocks.holding(request.id, computed))
        for number, job in enumerate(plan.loads):
            loading = self._requests.known.get(job.request)  # else it was aborted
            if loading and (copies := self._scratch.hold_donors(loading, unready)).blocks:
                plan.loads[number] = replace(job, source=replace(job.source, donors=copies.segments))
                loading.reuse.copied_tokens = copies.n_tokens

    def begin_step(self, n_scheduled: int) -> int:
        """A step is planned, in which vLLM computes so many tokens; returns how many are recomputed at most."""
        self._queue.next_step()
        self._waits_until = 0.0
        now = time.monotonic()
        self._steps_s.append(now - self._begun_at)
        self._begun_at = now
        if self._costs:
            # Where vLLM had nothing to do, a pause is no step: what takes longer than the least forward does not count.
            step = min(*self._steps_s, self._costs.prefill.seconds(0))
            self._costs = replace(self._costs, step=step)
        for request in self._requests.busy.values():
            if lookup := request.reuse.lookup:
                lookup.done()  # so that the session is mended before their turn, if the hub has not answered
            if self._shows_hashes:
                request.hashes.take_back()
        return self._queue.budget(n_scheduled)

    def loaded(self, request: ServedRequest, result: LoadResult) -> None:
        """Take note of how a load has ended."""
        self._scratch.free_donors(request.blocks)
        if result.error:
            self._scratch.give_back(request.blocks)
            self._scratch.states.give_back(request.blocks)
        else:
            self._scratch.loaded(request.blocks)
        request.end_load(result)
        self._queue.end(request.request)
        self._reports.count_load(request.reuse, result)
        self._settled.remember(request)

    def ended(self, request: ServedRequest) -> None:
        """A request has ended, or was aborted."""
        self._queue.end(request.request)
        self._scratch.ended(request.blocks)
        if request.reuse.stage is not Stage.LOADING:
            request.reuse.end_lookup()
            self._settled.remember(request)

    def stopped(self, request: ServedRequest, result: LoadResult) -> None:
        """The workers have stopped the load of a request that has ended."""
        self._scratch.free_donors(request.blocks)
        self._scratch.give_back(request.blocks)
        self._scratch.states.give_back(request.blocks)
        request.reuse.end_load(result)

    def clear(self) -> None:
        """Forget what vLLM and the hub had, both to be cleared; what waits is looked up again at its turn."""
        self._settled.clear()
        self._scratch.donors.clear()
        for request in self._requests.known.values():
            if request.reuse.stage in (Stage.LOOKING_UP, Stage.FOUND):
                request.reuse.look_up(None)

    def _look_up(
        self, request: ServedRequest, local: int | None = None, *, waits_for_store: bool = True
    ) -> Answer[Found]:
        """Look up a request, or look it up again. What vLLM has is neither leased nor fetched from the store.

        ``local``: how many of the first tokens vLLM has; None: it is asked.
        """
        engine_request, timeout_s = request.request, self._settings.lookup_timeout_s
        if local is None and not engine_request.skip_reading_prefix_cache:
            local = self._scratch.blocks.cached_tokens(engine_request.block_hashes, engine_request.num_tokens - 1)
        tokens = request.tokens()
        # vLLM computes the last token. It could not go on from the state behind that.
        lookup = self._client.lookup(
            tokens[:-1] if self._scratch.tables.of_states else tokens,
            request.terms.variant,
            skip_prefix=local or 0,
            wait_s=timeout_s * STORE_SHARE if waits_for_store else 0.0,
            settled=None if self._scratch.tables.of_states else request.terms.settled_ratio,
            timeout=timeout_s,
        )
        request.reuse.look_up(lookup)
        return lookup

    def _is_decided(self, request: ServedRequest, local: int) -> bool:
        """Whether it is known what a request reuses behind the first ``local`` tokens; if not, it must wait."""
        if request.request.skip_reading_prefix_cache and not request.reuse.refusal:
            self._reports.refuse(
                request, Refusal(Why.ALL_COMPUTED, "the request needs every token computed, as prompt logprobs do")
            )
        if request.reuse.stage is Stage.COMPUTING:
            return True
        try:
            return self._has_found(request, local) and self._decide(request)
        except BlendHubError as error:
            is_late = isinstance(error, DeadlineExceeded)
            hint = "; lookup_timeout_s says how long a lookup may take" if is_late else ""
            self._reports.refuse(request, Refusal(Why.HUB_FAILED, f"{type(error).__name__}: {error}{hint}"))
            return True

    def _has_found(self, request: ServedRequest, local: int) -> bool:
        """Whether the hub has said what it has behind the first ``local`` tokens. Raises if it did not in time.

        What it said long ago, while the request waited for its turn, is asked again where that may help.
        """
        reuse = request.reuse
        is_first, reuse.had_its_turn = not reuse.had_its_turn, True
        lookup = reuse.lookup
        if (
            lookup is None  # it was preempted and lost its blocks, or the cache was cleared
            or lookup.has_ended
            or local < lookup.request.skip_prefix_n_tokens  # vLLM has evicted what it had
            or (is_first and lookup.error)  # the hub may answer by now
        ):
            lookup = self._look_up(request, local)
        elif reuse.stage is Stage.LOOKING_UP and _lacks_some(lookup):
            lookup = self._look_up(request, local, waits_for_store=False)
        if reuse.stage is not Stage.LOOKING_UP:
            return True
        if not lookup.done(self.wait_left_s):
            self._client.check_up()
            return False
        found = lookup.result()
        self._admission.heard(found.ratio)
        reuse.answered(found)
        self._reports.times.add("lookup_seconds", time.monotonic() - lookup.sent_at)
        return True

    def _decide(self, request: ServedRequest) -> bool:
        """Decide what a request reuses; returns False if it must wait for scratch that others use."""
        request.reuse.decided(self._choice(request, has_scratch=True))
        borrowed = self._scratch.borrow(request)
        if borrowed is Borrowed.LATER:
            return False
        if borrowed is Borrowed.NO:
            request.reuse.decided(self._choice(request, has_scratch=False))
        choice = request.reuse.choice
        if choice and choice.decision is None:
            assert choice.refusal
            self._reports.refuse(request, choice.refusal)
        return True

    def _note_where_others_left(self, request: ServedRequest) -> None:
        """Have vLLM end a step where stored text ends behind which no state is stored, as it does for its own cache."""
        if size := self._scratch.tables.state_tokens:
            texts = request.reuse.found.staying if request.reuse.found else ()
            ends = [text.span.end // size * size for text in texts if text.code is Why.NO_STATE]
            request.request.shared_prefix_boundary = max([request.request.shared_prefix_boundary, *ends])

    def _choice(self, request: ServedRequest, *, has_scratch: bool) -> Choice:
        """What to reuse of what was found."""
        terms = request.terms
        limits = Limits(
            ratio=terms.ratio,
            usual_ratio=self._admission.usual_ratio,
            blends_from=(request.hashes.n_shown if self._shows_hashes else 0) if request.can_blend else None,
            holes=terms.fills_holes,
            min_reused_tokens=self._settings.policy.min_reused_tokens,
            n_positions=self._n_positions,
            costs=self._costs,
            has_scratch=has_scratch,
            looks_ahead=self._looks_ahead,
        )
        found, n_tokens = request.reuse.found or Found(), request.request.num_tokens
        choice = decide(found, n_tokens, request.blocks.engine_tokens, limits)
        return self._with_segments(request, choice, found) if self._map_tokens and has_scratch else choice

    def _with_segments(self, request: ServedRequest, choice: Choice, found: Found) -> Choice:
        """The choice, with maps to be made of what the prompt repeats, so that later prompts move it."""
        terms, local = request.terms, request.blocks.engine_tokens
        if not (request.can_blend and terms.fills_holes and terms.stores):
            return choice
        decision = choice.decision or Decision(local, local, (), terms.ratio)
        text = Span(decision.state_end, request.prompt_end - 1)
        segments = segments_to_make(found.staying, text, terms.donates_from, self._map_tokens, self._costs)
        if not segments:
            return choice
        end = max(decision.end, segments[-1].end)
        return replace(choice, decision=replace(decision, end=end, segments=segments))


def _lacks_some(lookup: Answer[Found]) -> bool:
    """Whether the hub answered before all was there that it has, and more may be there by now."""
    return lookup.request.wait_s > 0 and lookup.reply is not None and bool(lookup.reply.on_the_way)
