"""Scheduler side of saving: reserves slots in the hub, and has the workers write each chunk that a step completes."""

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec.structs import replace
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.client.hub_client import HubClient
from blendhub.client.write_rights import WriteRight
from blendhub.core.errors import AdapterReplaced, DeadlineExceeded
from blendhub.core.layout import MIN_SAVED_TOKENS
from blendhub.core.provenance import Kind, Provenance, StateMap
from blendhub.core.spans import Span, gaps, join_spans
from blendhub.vllm.messages import NULL_BLOCK, SaveJob, StepPlan
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.blocks.donor_blocks import RunName
from blendhub.vllm.scheduler.blocks.scratch import Scratch
from blendhub.vllm.scheduler.reports import Reports
from blendhub.vllm.scheduler.request.blocks import Tables
from blendhub.vllm.scheduler.request.reuse import Stage
from blendhub.vllm.scheduler.request.served_request import Ending, Requests, ServedRequest
from blendhub.vllm.scheduler.startup import ArenaWatch

STATE = Provenance(has_state=True)
"""The provenance of a chunk with a state. All requests share it, because such a chunk is of use behind its prefix only.
"""


class SaveScheduler:
    """All methods are called by the scheduler's thread. Only ``prepare`` waits for the hub.

    What is reserved of a request is written by the workers as steps complete it. Once the request has ended, its blocks
    are kept until everything is reserved and named in a plan, and the record until the workers have committed that.
    """

    def __init__(
        self,
        client: HubClient,
        requests: Requests,
        scratch: Scratch,
        arena: ArenaWatch,
        admission: Admission,
        reports: Reports,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._requests = requests
        self._scratch = scratch
        self._arena = arena
        self._adapters = admission.adapters
        self._chunk_tokens = admission.namespace.layout.chunk_tokens
        self._reports = reports
        self._timeout_s = timeout_s
        self.has_windows = scratch.tables.shortest_window is not None
        """Whether vLLM frees blocks of running requests: those that have left a window, of at least two chunks."""
        self._state_tokens = scratch.tables.state_tokens

    def plan_step(self, plan: StepPlan, step: SchedulerOutput) -> None:
        """Add the saves of what this step computes, and of requests that have ended."""
        self._arena.look()
        for request in self._requests.busy.values():
            saves = request.saves
            is_stored = saves.is_done and not self.has_windows
            if is_stored or not request.terms.stores or not request.blocks.are_allocated:
                continue
            self._note_loaded_by_other(request)
            if n_scheduled := step.num_scheduled_tokens.get(request.id):
                saves.begun_in = saves.begun_in or plan.number
                saves.reached = request.request.num_computed_tokens + n_scheduled
                # With windows, an answer is stored while it is written, by whole chunks.
                written = _written_end(request) if self.has_windows else 0
                computed = max(written, min(saves.reached, request.request.num_prompt_tokens))
                if self._reserve(request, written // self._chunk_tokens * self._chunk_tokens):
                    self._plan_saves(request, computed, self._scratch.blocks.of(request.id), plan)
        for request in self._requests.ended.values():
            if request.ending is Ending.SAVING:
                self._save_ended(request, plan)
        self._scratch.end_step(self._needs_blocks)

    def prepare(self, request: ServedRequest, are_opening: bool, within: float) -> bool:
        """Reserve slots for a request that vLLM is about to schedule; returns whether its first step can be stored.

        In the second step, vLLM frees blocks of the first that have left a window. So with windows, a request waits
        until the hub has reserved its slots, up to ``within`` seconds in each step, and until no worker's session is
        opening. With states, whose blocks vLLM may free at any time, a request waits for the sessions, too.
        """
        frees_blocks = self.has_windows or self._state_tokens
        if not frees_blocks or not request.terms.stores or request.request.lora_request:
            return True
        saves, now = request.saves, time.monotonic()
        saves.asked_at = saves.asked_at or now
        if self.has_windows:
            self._reserve(request)
        until = now + within
        is_ready = not are_opening and all(answer.done(max(0.0, until - time.monotonic())) for answer in saves.asked)
        return is_ready or now > saves.asked_at + self._timeout_s

    def repaired(self, request: ServedRequest) -> None:
        """All KV of a request is exact now, which may have ended: store it as such."""
        request.saves.drop()
        if request.saves.begun_in:
            self._reserve(request)

    def end(self, request: ServedRequest) -> bool:
        """A request has ended, and is repaired no more; returns whether its blocks are still needed to store it."""
        saves = request.saves
        # Of what was dropped, workers may have copies under way.
        if saves.begun_in and (saves.planned_end is not None or saves.is_dropped or request.lacks_adapter):
            self._reserve(request, _written_end(request))
            return True
        saves.close()
        self._scratch.give_back(request.blocks)
        return False

    def drop_all(self) -> None:
        """Store nothing that was computed until now, nor what the workers are saving."""
        for request in (*self._requests.known.values(), *self._requests.ended.values()):
            request.saves.is_dropped |= request.blocks.are_allocated
            request.saves.close()

    def _save_ended(self, request: ServedRequest, plan: StepPlan) -> None:
        saves, end = request.saves, _written_end(request)
        is_planned = self._reserve(request, end)
        if is_planned:
            assert request.blocks.kept is not None
            self._plan_saves(request, end, request.blocks.kept, plan)
        if saves.asked if is_planned else not saves.is_dropped:
            if time.monotonic() < request.ended_at + self._timeout_s:
                return
            missing = "the hub reserved no slots" if is_planned else "the workers reported no LoRA adapter"
            late = DeadlineExceeded(f"{missing} within lookup_timeout_s {self._timeout_s} of the end")
            self._reports.unreserved(late)
        plan.ending.add(request.id)
        request.ending = Ending.COMMITTING

    def _needs_blocks(self, request: ServedRequest) -> bool:
        """Whether some of what a request has loaded or computed is still to be written, or to be repaired."""
        saves = request.saves
        is_saved = request.terms.stores and not saves.is_dropped and (saves.planned_end is None or bool(saves.asked))
        if request.ending:
            is_saved = request.ending is Ending.SAVING
        return is_saved or request.repair.progress is not None

    def _note_loaded_by_other(self, request: ServedRequest) -> None:
        """Notice what another connector loads, or has loaded."""
        saves, before = request.saves, request.request.num_computed_tokens
        behind = max(saves.reached, request.reused_end)
        if before <= behind or request.reuse.stage is Stage.LOADING:
            return
        # In windows, only the last blocks are loaded. For what vLLM computes behind them, slots are reserved without
        # them, and the hub answers while the other connector loads.
        request.loaded_by_other(Span(behind, before), is_whole=not self.has_windows)
        saves.reached = before
        if self.has_windows:
            saves.close()
            self._reserve(request)

    def _reserve(self, request: ServedRequest, end: int = 0) -> bool:
        """Reserve slots for what the hub lacks of the prompt, and of the answer up to ``end``, whose KV is computed.

        Returns False until the request's adapter is known.
        """
        saves = request.saves
        last = saves.reservations[-1].reply if saves.reservations else None
        spans: list[tuple[Span, Provenance]] = []
        if saves.planned_end is None:
            if saves.is_dropped or not self._is_of_one_adapter(request):
                return False
            saves.planned_end = request.prompt_end
            # What was blended is found as settled, and then lacks a state.
            stores_blended = self._arena.stores_blended and not self._state_tokens
            lacking = spans_to_save(request, stores_blended=stores_blended, keeps_windows=self.has_windows)
            spans += self._with_states(request, lacking, self._states_of_prompt(request))
            spans += _segments(request)
        if end > saves.planned_end and not request.has_media:
            computed = Span(saves.planned_end, end), request.kv.of_computed(request.terms.donates_from)
            spans += self._with_states(request, [computed], self._last_state(request, end))
            saves.planned_end = end
        for span, provenance in spans:
            self._ask(request, span, provenance, last.run if last and last.span.end == span.start else None)
        return True

    def _ask(self, request: ServedRequest, span: Span, provenance: Provenance, run: int | None = None) -> None:
        # The terms name the adapter now.
        variant, tokens = request.terms.variant, request.tokens()[: span.end]
        answer = self._client.reserve(tokens, span, variant, provenance, run)
        request.saves.asked.append(answer)
        request.saves.reservations.append(answer)

    def _states_of_prompt(self, request: ServedRequest) -> list[int]:
        """Behind which tokens states of a prompt are stored: where it ends, and where other prompts have left it. vLLM
        ends steps there."""
        if not (size := self._state_tokens):
            return []
        prompt = request.request
        ends = {(prompt.num_prompt_tokens - 1) // size * size, prompt.shared_prefix_boundary // size * size}
        return sorted(end for end in ends if 0 < end <= request.prompt_end)

    def _last_state(self, request: ServedRequest, end: int) -> list[int]:
        """The last state before ``end``, if vLLM still has it."""
        if not (size := self._state_tokens):
            return []
        last = end // size * size
        return [last] if last > request.saves.state_end and self._scratch.blocks.states(request.request, last) else []

    def _with_states(
        self, request: ServedRequest, spans: Iterable[tuple[Span, Provenance]], ends: Sequence[int]
    ) -> list[tuple[Span, Provenance]]:
        """``spans``, and apart from them the chunks that are stored with the states at their ends."""
        chunks = [Span(end - self._chunk_tokens, end) for end in ends if request.first_approximate is None]
        request.saves.state_end = max([request.saves.state_end, *ends])
        without = [(part, provenance) for span, provenance in spans for part in gaps(span, chunks)]
        return sorted([*without, *((chunk, STATE) for chunk in chunks)], key=lambda pair: pair[0])

    def _is_of_one_adapter(self, request: ServedRequest) -> bool:
        """Whether all KV of a request was computed with the weights that its adapter has now, as far as is known.

        The workers check it again for each save.
        """
        lora = request.request.lora_request
        if lora is None:
            return True
        # If it was not loaded when the request arrived, the report of the request's own step says what was loaded.
        adapter = request.terms.adapter or self._adapters.find(lora)
        if adapter is None:
            return False
        request.identify(adapter)
        was_replaced = request.blocks.engine_tokens and self._adapters.was_replaced(lora)
        if adapter.since <= request.saves.begun_in and not was_replaced:
            return True
        request.saves.is_dropped = True
        text = f"LoRA adapter {lora.lora_name} got other weights, and some of the KV may be of earlier ones"
        self._reports.unreserved(AdapterReplaced(text))
        return False

    def _plan_saves(self, request: ServedRequest, computed: int, tables: Tables, plan: StepPlan) -> None:
        """Hear what the hub has reserved, and have each chunk written that is complete with the tokens up to
        ``computed``."""
        saves, adapter = request.saves, request.terms.adapter
        for answer in [answer for answer in saves.asked if answer.done()]:
            saves.asked.remove(answer)
            if answer.error:
                self._reports.unreserved(answer.error)
            elif (reservation := answer.result()).right:
                right, provenance = reservation.right, reservation.provenance
                if provenance.is_exact and reservation.run is not None:
                    name = RunName(right.epoch, reservation.run)
                    self._scratch.donors.remember(name, reservation.span, request.hashes.own())
                saves.reserved += [
                    SaveJob(
                        request.id,
                        right,
                        slot,
                        (),
                        adapter,
                        provenance.has_state,
                        provenance.map_bytes_at(slot.span.end),
                    )
                    for slot in reservation.slots
                ]
        complete = [job for job in saves.reserved if job.slot.span.end <= computed]
        if not complete:
            return
        sizes, of_states = self._scratch.tables.block_sizes, self._scratch.tables.of_states
        blocks = [np.asarray(table, np.int64) for table in self._scratch.complete(request.blocks, tables)]
        kv_blocks = [pair for table, pair in enumerate(zip(blocks, sizes, strict=True)) if table not in of_states]
        given_up: set[WriteRight] = set()
        """The rights under which some slot is not written: a commit would vouch for all before it."""
        for job in complete:
            start, end = job.slot.span.start, job.slot.span.end
            if job.right in given_up:
                continue
            states = self._scratch.blocks.states(request.request, end) if job.has_state else {}
            if any(NULL_BLOCK in table[start // n : -(-end // n)] for table, n in kv_blocks):
                given_up.add(job.right)
                freed = "vLLM had freed the blocks when the hub reserved slots for their KV"
                self._reports.unreserved(DeadlineExceeded(freed))
            elif job.has_state and not states:
                # vLLM has computed over it, or has evicted it: the KV alone is stored.
                given_up.add(job.right)
                self._ask(request, job.slot.span, request.kv.of_computed(request.terms.donates_from))
            else:
                for table in of_states:
                    blocks[table] = np.array([states[table]] if states else [], np.int64)
                plan.saves.append(replace(job, blocks=tuple(blocks)))
                if job.map_bytes:
                    saves.map_ends.add(end)
        incomplete = [job for job in saves.reserved if job.slot.span.end > computed]
        saves.reserved = [job for job in incomplete if job.right not in given_up]


def _segments(request: ServedRequest) -> Iterator[tuple[Span, Provenance]]:
    """The segments of a prompt whose maps are there. Each is stored beside the prompt, in a run of its own."""
    made, kv, loaded = request.reuse.result, request.kv, request.reuse.loaded
    first = loaded.first_approximate if loaded else None  # no repair makes a map anew
    for span, n_bytes in made.segments if made else ():
        if span.end in request.saves.map_ends:
            continue
        kind: Kind = "exact" if first is None or span.end <= first else "after_blended"
        yield span, Provenance(kind, kv.ratio, request.terms.donates_from, map=StateMap(span, n_bytes))


def _written_end(request: ServedRequest) -> int:
    """The end of the tokens whose KV is computed: the last token was sampled, and its KV not computed yet."""
    return min(request.request.num_computed_tokens, request.request.num_tokens - 1)


def spans_to_save(
    request: ServedRequest, *, stores_blended: bool, keeps_windows: bool
) -> Iterator[tuple[Span, Provenance]]:
    """What the hub lacks of a prompt, except short spans between moved text: no lookup would find them again.

    ``keeps_windows``: vLLM's own cache has no more of some layers than the last window, which cannot be stored.
    """
    kv, terms, matches, n_prompt = request.kv, request.terms, request.reuse.matches, request.prompt_end
    first = kv.first_approximate
    if kv.blended and stores_blended:
        unmoved = [match.span for match in matches if not match.moved]
        if lacking := list(gaps(kv.blended, unmoved)):
            yield Span(lacking[0].start, lacking[-1].end), Provenance("blended", kv.ratio)
    # A trusted request offers all that is exact: the hub says of what it has a copy that may move.
    keeps_exact = not terms.donates
    stored = [match.span for match in matches if (keeps_exact if match.exact else first is not None)]
    # What was blended is no text that could be moved.
    stored += kv.not_computed
    if keeps_windows and request.blocks.engine_tokens:
        stored.append(Span(0, request.blocks.engine_tokens))
    stored = join_spans(stored)
    border = n_prompt if first is None else min(first, n_prompt)
    exact = Provenance(donates_from=terms.donates_from)
    yield from ((gap, exact) for gap in gaps(Span(0, border), stored))
    for gap in gaps(Span(border, n_prompt), stored):
        if gap.end == n_prompt or len(gap) >= MIN_SAVED_TOKENS:
            yield gap, kv.of_computed(terms.donates_from)
