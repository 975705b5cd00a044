"""This process's sessions with the hub: one a namespace, opened when it is first needed."""

import contextlib
import threading
from collections import OrderedDict

from blendhub.client import HubClient
from blendhub.errors import BlendHubError, PeerGone
from blendhub.host import PluginHost
from blendhub.layout import Namespace
from blendhub.vllm.messages import HubAddress

MOST_SESSIONS = 64
"""Requests choose cache salts, and each is a namespace: what was longest not used is closed."""


class Sessions:
    """Clients by namespace. ``open``, ``clear`` and ``close`` wait for the hub; ``ready`` never does."""

    def __init__(self, address: HubAddress, engine: str, rank: int, host: PluginHost) -> None:
        self.address = address
        self._engine = engine
        self._rank = rank
        self._host = host
        self._lock = threading.Lock()
        """Guards what follows; never held while the hub is asked."""
        self._clients: OrderedDict[str, HubClient] = OrderedDict()
        self._opening: HubClient | None = None
        self._is_closed = False

    def ready(self, namespace: Namespace) -> HubClient | None:
        """The session of a namespace, if it is open. May be called by any thread."""
        with self._lock:
            client = self._clients.get(namespace.digest)
            if client is not None:
                self._clients.move_to_end(namespace.digest)
            return client

    def open(self, namespace: Namespace) -> HubClient:
        """The session of a namespace; raises what the hub or the transport says. To be called by one thread."""
        client = self.ready(namespace)
        if client is not None:
            return client
        client = HubClient(
            self.address.endpoint, self.address.transport.name, self.address.transport.options, host=self._host
        )
        with self._lock:
            self._opening = client
        try:
            client.register(f"{self._engine}/{namespace.digest}", namespace, self._rank)
            with self._lock:
                if self._is_closed:
                    raise PeerGone("this process has left the hub")
                self._clients[namespace.digest] = client
                oldest = self._clients.popitem(last=False)[1] if len(self._clients) > MOST_SESSIONS else None
        except BaseException:
            client.close()
            raise
        if oldest:
            oldest.close()
        return client

    def clear(self) -> None:
        """Forget what is stored in the namespaces that are open."""
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            client.clear()

    def close(self) -> None:
        """Leave the hub; what another thread is asking ends with an error."""
        with self._lock:
            self._is_closed = True
            clients = [*self._clients.values(), *([self._opening] if self._opening else [])]
            self._clients.clear()
        # At once: a hub that does not answer is waited for once, not once a session.
        leaving = [threading.Thread(target=_leave, args=(client,), daemon=True) for client in clients]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()


def _leave(client: HubClient) -> None:
    with contextlib.suppress(BlendHubError):
        client.close()
