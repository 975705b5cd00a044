"""Deadlines of requests under way, at their very edge."""

import asyncio
import time

import pytest
from blendhub_transports.dispatcher import Dispatcher

from blendhub.contracts import Envelope
from blendhub.core.errors import DeadlineExceeded
from blendhub.testing.transports.base import EchoRequest, EchoService


@pytest.mark.parametrize("remaining", [1e-7, 1e-6, 1e-5, 1e-3, float("nan")])
def test_a_request_cancelled_at_its_deadline_ends_with_deadline_exceeded(remaining):
    answers = []

    async def ask() -> None:
        dispatcher = Dispatcher(EchoService(), 1000, "here")
        for number in range(300):
            request = Envelope(EchoRequest("slow", seconds=30.0))
            dispatcher.dispatch(b"peer", request, time.monotonic() + remaining, answers.append)
            while len(answers) == number:
                await asyncio.sleep(0)

    asyncio.run(ask())
    assert {type(answer) for answer in answers} == {DeadlineExceeded} and len(answers) == 300
