"""Answers requests about the fate of earlier prompts, and about what would be found of a prompt now."""

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Match
from blendhub.hub.handlers.base import DONE, Answer, Handlers
from blendhub.hub.index.namespace_index import NamespaceIndex, spans_of, whole_matches
from blendhub.hub.leases.sessions import EngineEntry, Session
from blendhub.hub.reports import ReportTable
from blendhub.hub.state import HubState


class ExplainHandlers:
    def __init__(self, state: HubState, reports: ReportTable, handlers: Handlers) -> None:
        self._state = state
        self._reports = reports
        self._read_tokens = handlers.read_tokens

    def reported(self, session: Session, message: wire.Reported, payload: Sequence[Buffer]) -> Answer:
        self._reports.add(session.engine.name, message.reports)
        return DONE

    def explain(self, message: wire.Explain, payload: Sequence[Buffer]) -> Answer:
        found = self._reports.find(message.request)
        return wire.Explained(*found) if found else wire.Explained()

    def preview(self, message: wire.Preview, payload: Sequence[Buffer]) -> Answer | Awaitable[Answer]:
        tokens, engine = self._read_tokens(payload), self._engine(message.engine)
        index = self._state.indexes.find(engine.base, message.variant)
        if index is None or not len(tokens):
            return wire.Previewed(engine.name, engine.namespace.model)
        matched = index.queue.ask(partial(index.match, tokens), len(tokens))
        if isinstance(matched, asyncio.Future):
            return _later(engine, index, matched)
        return _previewed(engine, index, matched)

    def _engine(self, name: str) -> EngineEntry:
        engines = self._state.sessions.engines()
        if not name and len(engines) == 1:
            return engines[0]
        found = self._state.sessions.engine(name)
        if found is None:
            names = ", ".join(engine.name for engine in engines) or "none: start vLLM with this hub"
            raise InvalidInput(
                f"no engine {name!r} is registered; name one of: {names}"
                if name or not engines
                else f"name one of the engines that are registered: {names}"
            )
        return found


async def _later(engine: EngineEntry, index: NamespaceIndex, matching: "asyncio.Future[list[Match]]") -> Answer:
    return _previewed(engine, index, await matching)


def _previewed(engine: EngineEntry, index: NamespaceIndex, matches: Sequence[Match]) -> Answer:
    found = index.cut_at_chunks(matches, 0)
    ready = [one for one in found if one.chunk.offset is not None]
    missing = [one for one in found if one.chunk.offset is None]
    exact = sum(one.end - one.start for one in found if one.match.exact)
    return wire.Previewed(engine.name, engine.namespace.model, tuple(whole_matches(ready)), spans_of(missing), exact)
