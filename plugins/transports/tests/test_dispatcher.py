"""Deadlines of requests under way, at their very edge."""

import asyncio

import pytest
from blendhub_transports.dispatcher import Dispatcher

from blendhub.contracts import Envelope
from blendhub.errors import DeadlineExceeded
from blendhub.testing.transports.base import EchoRequest, EchoService


@pytest.mark.parametrize("remaining", [1e-7, 1e-6, 1e-5, 1e-3])
def test_what_is_cancelled_at_its_deadline_is_told_so(remaining):
    answers = []

    async def ask() -> None:
        dispatcher = Dispatcher(EchoService(), 1000, "here")
        for _ in range(300):
            dispatcher.take(b"peer", Envelope(EchoRequest("slow", seconds=30.0)), remaining, answers.append)
            while not dispatcher.idle():
                await asyncio.sleep(0)

    asyncio.run(ask())
    assert {type(answer) for answer in answers} == {DeadlineExceeded} and len(answers) == 300
