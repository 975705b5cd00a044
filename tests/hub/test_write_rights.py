"""The right to write ends for good, in every way in which it can end."""

import msgspec
import pytest

from blendhub.client.write_rights import WriteRight, WriteRights
from blendhub.core.errors import LeaseError

RIGHT = WriteRight(lease=7, number=20, epoch=1, arena="nonce", end=64, deadline=100.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def rights(clock):
    rights = WriteRights(clock)
    rights.begin_session(1, "nonce", first=10, granted_before=(3,), longest_lease_s=120.0)
    return rights


def write(rights: WriteRights, **other: object) -> None:
    right = msgspec.structs.replace(RIGHT, **other)
    rights.begin_write(right)
    rights.end_write(right)


@pytest.mark.parametrize(
    "other, why",
    [
        ({"epoch": 2}, "an earlier life of the hub"),
        ({"arena": "another"}, "another arena"),
        ({"number": 9}, "before this process registered"),
        ({"deadline": 0.0}, "its deadline has passed"),
    ],
)
def test_a_right_of_another_life_session_or_time_is_refused(rights, other, why):
    write(rights)
    with pytest.raises(LeaseError, match=why):
        write(rights, **other)


@pytest.mark.parametrize("ends", ["end", "revoke", "close", "end_session"])
def test_a_right_that_ended_is_refused_for_ever(rights, clock, ends):
    arguments = {"end": (RIGHT,), "revoke": ((RIGHT.lease,),), "close": (), "end_session": ()}[ends]
    getattr(rights, ends)(*arguments)
    for _ in range(3):
        with pytest.raises(LeaseError):
            write(rights)
        # What once made the process forget: it acknowledged the end, others ended, time passed.
        rights.acknowledged(rights.to_acknowledge())
        rights.revoke((1, 2))
        clock.now += 49.0
    if ends != "close":
        rights.begin_session(1, "nonce", first=30, granted_before=(), longest_lease_s=120.0)
    with pytest.raises(LeaseError):
        write(rights)
