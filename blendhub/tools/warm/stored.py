"""What the hub of a server has of a prompt, asked without the server."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError
from blendhub.core.layout import Variant
from blendhub.framework.host import PluginHost

REPORTED_WITHIN_S = 5.0
"""An engine reports a prompt to its hub a moment after its answer."""
PAUSE_S = 0.1


class Stored:
    """The hub that an engine uses, and the namespace of its requests with one ``cache_salt``."""

    def __init__(self, hub: HubClient, engine: str, salt: str = "") -> None:
        self._hub = hub
        self._engine = engine
        self._variant = Variant(cache_salt=salt)

    @classmethod
    def find(cls, endpoint: str, options: dict[str, Any], request: str, salt: str = "") -> "Stored":
        """The hub at this endpoint. Raises BlendHubError if it does not answer, or has not seen this request."""
        if (socket := endpoint.removeprefix("ipc://")) != endpoint and not Path(socket).exists():
            raise BlendHubError(f"no hub listens at {endpoint}")
        hub = HubClient(endpoint, options=options, host=PluginHost.discover())
        try:
            until = time.monotonic() + REPORTED_WITHIN_S
            while not (engine := hub.explain(request).engine):
                if time.monotonic() > until:
                    raise BlendHubError(f"the hub at {endpoint} is not the one that the server uses")
                time.sleep(PAUSE_S)
        except BaseException:
            hub.close()
            raise
        return cls(hub, engine, salt)

    def lacks(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt are not stored exactly, neither in the arena nor in the store."""
        found = self._hub.preview(np.asarray(prompt, np.uint32), self._engine, self._variant)
        return len(prompt) - found.exact_tokens

    @property
    def arena_gib(self) -> float:
        return self._hub.stats().gauges["arena_bytes"] / 2**30

    @property
    def has_store(self) -> bool:
        return self._hub.stats().counters["store_saves"] > 0

    def wait_until_saved(self) -> bool:
        """Wait until the store has what was computed, as long as it makes progress; returns whether it has."""
        waiting, since = -1.0, time.monotonic()
        while time.monotonic() < since + REPORTED_WITHIN_S:
            gauges = self._hub.stats().gauges
            left = gauges["store_waiting_chunks"] + gauges["store_later_chunks"] + gauges["write_leases"]
            if not left:
                return True
            if left != waiting:
                waiting, since = left, time.monotonic()
            time.sleep(PAUSE_S)
        return False

    def close(self) -> None:
        with contextlib.suppress(BlendHubError):
            self._hub.close()
