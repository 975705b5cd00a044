"""The soak's hostile client: sends messages that mean harm as fast as the hub answers them."""

import random
import time
from collections import Counter, deque
from multiprocessing.connection import Connection

from benchmarks.soak.hostile import Hostile, Message
from blendhub.client import wire
from blendhub.contracts import Envelope
from blendhub.contracts.transport import Pending
from blendhub.core.errors import BlendHubError, InvalidInput, PeerGone, ServiceFailed, StaleEpoch, UnknownSession
from blendhub.framework.host import PluginHost

UNDER_WAY = 32
TIMEOUT_S = 5.0


def intrude(endpoint: str, seed: int, orders: Connection) -> None:
    """For each number received, sends as many messages, and answers with what became of them."""
    host = PluginHost.discover()
    connection = host.create("transport", "zmq").connect(endpoint, wire.client_codec())
    hostile = Hostile(random.Random(seed), 0, [])
    while True:
        try:
            messages = orders.recv()
        except EOFError:
            break
        counted: Counter[str] = Counter()
        waiting: deque[tuple[Message, Pending]] = deque()
        for _ in range(messages):
            message, payload = hostile.next()
            try:
                waiting.append((message, connection.submit(Envelope(message, payload), TIMEOUT_S)))
            except (InvalidInput, PeerGone) as error:
                counted[f"hostile: {type(error).__name__}"] += 1
                time.sleep(0.01)
            # A registration is waited for: without one, no other message means anything.
            while len(waiting) > (0 if isinstance(message, wire.Register) else UNDER_WAY):
                _take(*waiting.popleft(), hostile, counted)
        while waiting:
            _take(*waiting.popleft(), hostile, counted)
        orders.send(counted)
    connection.close()


def _take(message: Message, pending: Pending, hostile: Hostile, counted: Counter[str]) -> None:
    try:
        hostile.note(message, pending.result().message)
        counted["hostile: answered"] += 1
    except ServiceFailed:
        counted["ERRORS WITHOUT A TYPE"] += 1
    except (UnknownSession, StaleEpoch) as error:
        counted[f"hostile: {type(error).__name__}"] += 1
        if hostile.chance.random() < 0.05:
            hostile.forget_sessions()
    except BlendHubError as error:
        counted[f"hostile: {type(error).__name__}"] += 1
