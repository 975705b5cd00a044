"""Answers requests about the fate of earlier prompts, and about what would be found of a prompt now."""

from collections.abc import Sequence
from dataclasses import dataclass

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput
from blendhub.hub.counters import Counters
from blendhub.hub.handlers.tokens import read_tokens
from blendhub.hub.index.finding import Finding, find
from blendhub.hub.leases.sessions import EngineEntry, Session
from blendhub.hub.ratios import Ratios
from blendhub.hub.reports import ReportTable
from blendhub.hub.state import HubState


@dataclass(frozen=True)
class ExplainHandlers:
    state: HubState
    counters: Counters
    reports: ReportTable
    ratios: Ratios

    def reported(self, session: Session, message: wire.Reported, payload: Sequence[Buffer]) -> wire.Reply:
        self.reports.add(session.engine.name, message.outcomes)
        for outcome in message.outcomes:
            if outcome.audit and outcome.is_sample:
                self.counters.audits[session.engine.base].add(agrees=outcome.audit.agrees)
            self.ratios.learn(session.engine.base, outcome)
        return wire.Done()

    def explain(self, message: wire.Explain, payload: Sequence[Buffer]) -> wire.Reply:
        engine_and_report = self.reports.find(message.request)
        return wire.Explained(*engine_and_report) if engine_and_report else wire.Explained()

    async def preview(self, message: wire.Preview, payload: Sequence[Buffer]) -> wire.Reply:
        tokens, engine = read_tokens(payload), self._engine(message.engine)
        index = self.state.indexes.find(engine.base, message.variant)
        if index is None:
            return wire.Previewed(engine.name, engine.namespace.model)
        finding = find(index, tokens)
        finding = finding if isinstance(finding, Finding) else await finding
        return wire.Previewed(
            engine.name,
            engine.namespace.model,
            finding.matches,
            finding.on_the_way,
            tuple(finding.staying[: wire.MAX_MATCHES]),
            sum(part.end - part.start for part in finding.parts if part.match.exact),
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
