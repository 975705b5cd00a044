"""This process's sessions with the hub: one a namespace, opened when it is first needed."""

import contextlib
from collections import OrderedDict

from blendhub.client import HubClient
from blendhub.errors import BlendHubError
from blendhub.host import PluginHost
from blendhub.layout import Namespace
from blendhub.vllm.messages import Address

MOST_SESSIONS = 64
"""Requests choose cache salts, and each is a namespace: what was longest not used is closed."""


class Sessions:
    """Clients by namespace. To be used by one thread at a time."""

    def __init__(self, address: Address, engine: str, rank: int, host: PluginHost) -> None:
        self._address = address
        self._engine = engine
        self._rank = rank
        self._host = host
        self._clients: OrderedDict[str, HubClient] = OrderedDict()

    def open(self, namespace: Namespace) -> HubClient:
        """The session of a namespace. Waits for the hub if it is new; raises what the hub or the transport says."""
        digest = namespace.digest
        client = self._clients.get(digest)
        if client is None:
            client = HubClient(self._address.endpoint, self._address.transport, self._address.options, host=self._host)
            try:
                client.register(f"{self._engine}/{digest}", namespace, self._rank)
            except BaseException:
                client.close()
                raise
            self._clients[digest] = client
            if len(self._clients) > MOST_SESSIONS:
                _, oldest = self._clients.popitem(last=False)
                oldest.close()
        self._clients.move_to_end(digest)
        return client

    def clear(self) -> None:
        """Forget what is stored in the namespaces that are open."""
        for client in self._clients.values():
            client.clear()

    def close(self) -> None:
        for client in self._clients.values():
            with contextlib.suppress(BlendHubError):
                client.close()
        self._clients.clear()
