"""What `blendhub advise` chooses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.advice.choice import Advice, Audited, Measured, advise, settings_for
from blendhub.cli import main


def measured(selector: str, ratio: float, agreed: int, of: int) -> Measured:
    return Measured(selector, ratio, tuple(Audited(number < agreed, 0.1 * number, 100) for number in range(of)))


CASES = st.lists(
    st.builds(
        measured,
        st.sampled_from("ab"),
        st.sampled_from([0.05, 0.1, 0.5]),
        st.integers(0, 200),
        st.sampled_from([0, 200]),
    ),
    max_size=6,
)


@given(CASES, st.floats(0.5, 1))
def test_what_is_advised_recomputes_least_of_all_that_hold_the_target(cases, target):
    advice = advise(cases, target)
    certain = [one.ratio for one in cases if one.audits and one.interval.low >= target]
    observed = [one.ratio for one in cases if one.audits and one.agreement >= target]
    assert (advice.chosen is None) == (not observed)
    if advice.chosen:
        assert advice.is_certain == bool(certain)
        assert advice.chosen.ratio == min(certain or observed)


def test_of_equal_ratios_the_one_that_agrees_more_is_advised():
    cases = [measured("a", 0.1, 190, 200), measured("b", 0.1, 199, 200), measured("b", 0.2, 200, 200)]
    assert advise(cases, 0.9) == Advice(cases[1], True)
    assert advise(cases, 0.99) == Advice(cases[1], False)


def test_the_settings_to_paste_keep_what_was_given():
    given_ = {"endpoint": "ipc:///x", "selector": {"name": "a", "options": {"k": 3}}}
    one = measured("a", 0.2, 9, 9)
    assert settings_for(Advice(one, True), 0.95, given_) == given_ | {
        "recompute_ratio": 0.2,
        "expected_agreement": 0.95,
    }
    other = settings_for(Advice(measured("b", 0.2, 9, 9), True), 0.95, given_)
    assert other["selector"] == {"name": "b"} and other["endpoint"] == "ipc:///x"
    assert settings_for(Advice(None, False), 0.95, {"store": False}) == {"store": False, "mode": "exact"}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--agreement", "2"], "--agreement 2.0 should be"),
        (["--ratios", "0.1,x"], "--ratios '0.1,x' should be"),
        (["--selectors", "hkvdd"], "no selector 'hkvdd'"),
        (["--settings", '{"selectr": 1}'], "has no option 'selectr'"),
        (["--engine", "["], "--engine '[' is not a JSON object"),
        (["--most", "0"], "--most 0 should be"),
        ([], "has no questions"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(tmp_path, capsys, flags, complaint):
    pytest.importorskip("blendhub_selectors", reason="needs a selector to choose from")
    (tmp_path / "data.jsonl").write_text("\n")
    assert main(["advise", "--model", "m", "--data", str(tmp_path / "data.jsonl"), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("blendhub: ") and complaint in error and error.count("\n") == 1
