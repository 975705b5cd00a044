"""The right to write ends for good, in every way in which it can end."""

import msgspec
import pytest

from blendhub.client.write_rights import MOST_ENDED, WriteRight, WriteRights
from blendhub.core.errors import LeaseError

RIGHT = WriteRight(lease=20, epoch=1, arena="nonce", end=64)


@pytest.fixture
def rights():
    rights = WriteRights()
    rights.begin_session(1, "nonce", first=10, granted_before=(3,))
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
        ({"lease": 9}, "before this process registered"),
    ],
)
def test_a_right_of_another_life_or_session_is_refused(rights, other, why):
    write(rights)
    write(rights, lease=3)
    with pytest.raises(LeaseError, match=why):
        write(rights, **other)


@pytest.mark.parametrize("ends", ["end", "revoke", "close", "end_session"])
def test_a_right_that_ended_is_refused_for_ever(rights, ends):
    arguments = {"end": (RIGHT,), "revoke": ((RIGHT.lease,),), "close": (), "end_session": ()}[ends]
    getattr(rights, ends)(*arguments)
    for first in (100, 100 + 2 * MOST_ENDED):
        with pytest.raises(LeaseError):
            write(rights)
        # What might make the process forget: it acknowledged the end, and thousands of others ended.
        rights.acknowledged(rights.to_acknowledge())
        rights.revoke(range(first, first + 2 * MOST_ENDED))
    if ends != "close":
        rights.begin_session(1, "nonce", first=30, granted_before=())
    with pytest.raises(LeaseError):
        write(rights)


def test_ended_leases_take_bounded_memory_and_later_ones_may_be_written(rights):
    rights.revoke(range(100, 100 + 10 * MOST_ENDED))
    assert len(rights._ended) <= 2 * MOST_ENDED
    write(rights, lease=100 + 10 * MOST_ENDED)


def test_leases_of_a_hub_that_was_restarted_have_the_same_numbers_and_may_be_written(rights):
    rights.end(RIGHT)
    rights.begin_session(2, "nonce", first=1, granted_before=())
    write(rights, epoch=2)
    rights.end(RIGHT)  # of the first life
    write(rights, epoch=2)
