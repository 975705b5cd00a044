"""What each of Mooncake's codes means for a key, and for the memory that was named with it."""

from blendhub_mooncake.codes import CodeMeaning, of_get, of_put

DONE, ABSENT, FAILED, ADRIFT = CodeMeaning
GETS = {
    **{4096: DONE, 4095: ABSENT, 0: ABSENT, -704: ABSENT, -712: ABSENT},
    **{-703: FAILED, -707: FAILED, -900: FAILED, -800: ADRIFT, -1: ADRIFT, -31337: ADRIFT},
}
PUTS = {0: DONE, -200: ABSENT, -900: FAILED, -704: ADRIFT, -800: ADRIFT, -31337: ADRIFT}


def test_a_key_is_absent_only_when_that_is_certain_and_adrift_unless_its_transfer_has_ended() -> None:
    assert {code: of_get(code, 4096) for code in GETS} == GETS
    assert {code: of_put(code) for code in PUTS} == PUTS
