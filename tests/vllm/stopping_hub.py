"""Stops the hub's process at a certain moment of an engine's life, which calls ``arrange`` before its start.

The environment's ``STOP_THE_HUB`` names a file; when a test writes "Release sent 1234" into it, process 1234 is stopped
just before the next message of that name is sent; "Release answered 1234": just after its answer was read.
"""

import os
import signal
from pathlib import Path

from blendhub.client.hub_client import HubClient, PendingReply

ORDER = Path(os.environ["STOP_THE_HUB"])
send, result = HubClient._send, PendingReply.result


def obey(name: str, moment: str) -> None:
    try:
        order = ORDER.read_text().split()
    except OSError:
        return
    if order[:2] == [name, moment]:
        ORDER.unlink()
        os.kill(int(order[2]), signal.SIGSTOP)


def send_obediently(self, message, *more, **named):
    obey(type(message).__name__, "sent")
    return send(self, message, *more, **named)


def result_obediently(self):
    answer = result(self)
    obey(type(self._request).__name__, "answered")
    return answer


def arrange():
    HubClient._send = send_obediently
    PendingReply.result = result_obediently
