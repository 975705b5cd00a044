"""The base of the groups of request handlers."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.hub.config import HubConfig
from blendhub.hub.counters import Counters
from blendhub.hub.leases.sessions import Session
from blendhub.hub.limits import MOST_PROMPT_TOKENS
from blendhub.hub.reports import ReportTable
from blendhub.hub.state import HubState
from blendhub.hub.stores.store_tier import StoreTier

Handler: TypeAlias = Callable[[Session, Any, Sequence[Buffer]], wire.Reply | Awaitable[wire.Reply]]
OpenHandler: TypeAlias = Callable[[Any, Sequence[Buffer]], wire.Reply | Awaitable[wire.Reply]]
"""The handler of a request that needs no session."""

DONE = wire.Done()


class Handlers:
    """A group of handlers, each for one type of message. They run on the event loop; slow work runs in threads."""

    def __init__(
        self,
        config: HubConfig,
        state: HubState,
        tier: StoreTier | None,
        counters: Counters,
        reports: ReportTable,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.state = state
        self.tier = tier
        self.counters = counters
        self.reports = reports
        self.clock = clock

    def check_session(self, message: wire.FromSession) -> None:
        """Raise unless the message's session still holds; to be called after every await."""
        self.state.sessions.get(message.session, message.epoch, self.clock())

    def read_tokens(self, payload: Sequence[Buffer]) -> Tokens:
        if len(payload) != 1:
            raise InvalidInput(f"tokens come as one payload of uint32, but this request has {len(payload)} payloads")
        tokens = as_tokens(memoryview(payload[0]))
        if len(tokens) > MOST_PROMPT_TOKENS:
            raise InvalidInput(f"{len(tokens)} tokens are more than the {MOST_PROMPT_TOKENS} that a hub accepts")
        return tokens
