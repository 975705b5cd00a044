"""What each of Mooncake's codes means for a key, and for the memory that was named with it."""

import pytest
from blendhub_mooncake.codes import Outcome, of_get, of_put


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (4096, Outcome.DONE),
        (4095, Outcome.ABSENT),
        (0, Outcome.ABSENT),
        (-704, Outcome.ABSENT),
        (-712, Outcome.ABSENT),
        (-703, Outcome.FAILED),
        (-707, Outcome.FAILED),
        (-900, Outcome.FAILED),
        (-800, Outcome.ADRIFT),
        (-1, Outcome.ADRIFT),
        (-31337, Outcome.ADRIFT),
    ],
)
def test_a_get_is_absent_only_when_that_is_certain_and_adrift_unless_its_transfer_has_ended(
    code: int, outcome: Outcome
) -> None:
    assert of_get(code, 4096) is outcome


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, Outcome.DONE),
        (-200, Outcome.ABSENT),
        (-900, Outcome.FAILED),
        (-704, Outcome.ADRIFT),
        (-800, Outcome.ADRIFT),
        (-31337, Outcome.ADRIFT),
    ],
)
def test_a_put_without_room_is_not_stored(code: int, outcome: Outcome) -> None:
    assert of_put(code) is outcome
