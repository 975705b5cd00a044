"""What end-to-end tests rely on: answers agree up to rounding and no further, and engines import what exists."""

import math
from importlib.util import find_spec

import pytest

from harness.engines import Answer, disagreement, template

FACTS = {"id": "", "report": {}, "transfer": {}, "cached": 0, "first_token_s": 0.0, "ended_s": 0.0}
SURE = {1: -0.1, 2: -3.0, 3: -4.0, 4: -5.0}
TIE, TURNED = {5: -1.0, 6: -1.00001, 7: -4.0, 8: -5.0}, {6: -1.0, 5: -1.00001, 7: -4.0, 8: -5.0}
AFTER_5, AFTER_6 = {1: -0.5, 2: -2.0}, {3: -0.7, 4: -2.5}


def answer(*steps):
    """An answer with the likely tokens of each step, the most likely one first."""
    return Answer(None, FACTS | {"tokens": [next(iter(step)) for step in steps], "logprobs": list(steps)})


def test_the_worst_step_counts_and_rounding_decides_between_equally_likely_tokens():
    same, other = answer(SURE, TIE, AFTER_5), answer(SURE, TIE | {5: -0.8}, AFTER_5)
    assert disagreement([same, same], [same, same]) == 0
    assert disagreement([same, same], [same, other]) == pytest.approx(0.2)
    assert disagreement([answer(SURE)], [answer({9: -0.1, 8: -3.0, 7: -4.0, 6: -5.0})]) == math.inf
    with pytest.raises(ValueError):
        disagreement([same], [answer(SURE)])
    # What follows two tokens that are almost equally likely is not compared, nor are tokens that only one answer has.
    assert disagreement([same], [answer(SURE, TURNED, AFTER_6)]) == pytest.approx(1e-5)
    assert disagreement([answer(SURE)], [answer({1: -0.1, 2: -3.0, 3: -4.0, 9: -5.0})]) == 0


def test_packages_may_be_absent_but_a_module_of_this_repository_that_was_renamed_is_an_error(monkeypatch):
    monkeypatch.setattr(template, "OTHERS", ("email",))
    for module in ("no_such_package.module", "email.no_such_module"):
        template.import_if_there(module)
    with pytest.raises(ModuleNotFoundError, match=r"blendhub\.no_such_module"):
        template.import_if_there("blendhub.no_such_module")
    ours = [module for module in (*template.IMPORTED, *template.ON_A_CPU) if module.startswith("blendhub")]
    assert [module for module in ours if find_spec(module.partition(".")[0]) and not find_spec(module)] == []
