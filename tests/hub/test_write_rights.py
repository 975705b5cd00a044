"""The right to write ends for good, in every way in which it can end."""

import threading

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


def test_leases_that_held_at_the_registration_are_good_though_they_are_older(rights):
    write(rights, lease=3, number=9)


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


def test_what_ended_is_forgotten_only_when_its_deadline_has_passed(rights, clock):
    rights.revoke(range(1000, 2000))
    clock.now += 119.0
    with pytest.raises(LeaseError):
        write(rights, lease=1500, deadline=120.0)
    clock.now += 2.0
    rights.revoke((1,))
    assert len(rights._ended) == 1
    with pytest.raises(LeaseError, match="deadline"):
        write(rights, lease=1500, deadline=120.0)


def test_the_end_of_a_lease_is_acknowledged_after_the_last_write(rights):
    rights.begin_write(RIGHT)
    rights.begin_write(RIGHT)
    rights.revoke((RIGHT.lease, 8))
    assert rights.to_acknowledge() == (8,)
    rights.end_write(RIGHT)
    assert rights.to_acknowledge() == (8,)
    rights.end_write(RIGHT)
    assert set(rights.to_acknowledge()) == {7, 8}
    rights.acknowledged((8,))
    assert rights.to_acknowledge() == (7,)


def test_waiting_for_writes_ends_with_the_last_of_them(rights):
    rights.begin_write(RIGHT)
    assert rights.wait_until_idle(0.01, lease=8)
    assert not rights.wait_until_idle(0.01, lease=7) and not rights.wait_until_idle(0.01)
    threading.Timer(0.05, rights.end_write, (RIGHT,)).start()
    assert rights.wait_until_idle(10)
