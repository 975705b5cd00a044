"""Deadlines of requests under way, at their very edge."""

import asyncio

import pytest
from blendhub_transports.desk import Desk

from blendhub.contracts import Envelope
from blendhub.errors import DeadlineExceeded
from blendhub.testing.transports.base import Ask, Parrot


@pytest.mark.parametrize("remaining", [1e-7, 1e-6, 1e-5, 1e-3])
def test_what_is_cancelled_at_its_deadline_is_told_so(remaining):
    answers = []

    async def ask() -> None:
        desk = Desk(Parrot(), 1000, "here")
        for _ in range(300):
            desk.take(b"peer", Envelope(Ask("slow", seconds=30.0)), remaining, answers.append)
            while not desk.idle():
                await asyncio.sleep(0)

    asyncio.run(ask())
    assert {type(answer) for answer in answers} == {DeadlineExceeded} and len(answers) == 300
