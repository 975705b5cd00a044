"""Answers requests about the fate of earlier prompts, and about what would be found of a prompt now."""

import asyncio
from collections.abc import Sequence
from functools import partial

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput
from blendhub.hub.handlers.base import DONE, Handlers
from blendhub.hub.index.namespace_index import spans_of, whole_matches
from blendhub.hub.leases.sessions import EngineEntry, Session


class ExplainHandlers(Handlers):
    def reported(self, session: Session, message: wire.Reported, payload: Sequence[Buffer]) -> wire.Reply:
        self.reports.add(session.engine.name, message.outcomes)
        for outcome in message.outcomes:
            if outcome.audit and outcome.is_sample:
                self.counters.audits[session.engine.base].add(agrees=outcome.audit.agrees)
        return DONE

    def explain(self, message: wire.Explain, payload: Sequence[Buffer]) -> wire.Reply:
        engine_and_report = self.reports.find(message.request)
        return wire.Explained(*engine_and_report) if engine_and_report else wire.Explained()

    async def preview(self, message: wire.Preview, payload: Sequence[Buffer]) -> wire.Reply:
        tokens, engine = self.read_tokens(payload), self._engine(message.engine)
        index = self.state.indexes.find(engine.base, message.variant)
        if index is None or not len(tokens):
            return wire.Previewed(engine.name, engine.namespace.model)
        answer = index.queue.ask(partial(index.look_up, tokens), len(tokens))
        stored = await answer if isinstance(answer, asyncio.Future) else answer
        chunk_matches = index.cut_at_chunks(stored.matches)
        return wire.Previewed(
            engine.name,
            engine.namespace.model,
            tuple(whole_matches([part for part in chunk_matches if part.chunk.offset is not None])),
            spans_of([part for part in chunk_matches if part.chunk.offset is None]),
            tuple(stored.staying[: wire.MOST_MATCHES]),
            sum(part.end - part.start for part in chunk_matches if part.match.exact),
        )

    def _engine(self, name: str) -> EngineEntry:
        engines = self.state.sessions.engines()
        if not name and len(engines) == 1:
            return engines[0]
        engine = self.state.sessions.engine(name)
        if engine is None:
            names = ", ".join(engine.name for engine in engines) or "none: start vLLM with this hub"
            raise InvalidInput(
                f"no engine {name!r} is registered; name one of: {names}"
                if name or not engines
                else f"name one of the engines that are registered: {names}"
            )
        return engine
