"""Which sentence of its contract each test of a suite stands for: its own, or that of the class that defines it."""

import inspect
import re
import sys
from collections.abc import Callable
from typing import TypeVar

Tested = TypeVar("Tested")


def holds(beginning: str) -> Callable[[Tested], Tested]:
    """The mark of a test, or of a class of tests: how the sentence of the contract begins."""

    def marked(tested: Tested) -> Tested:
        tested.sentence = beginning  # type: ignore[attr-defined]
        return tested

    return marked


def sentence_of(suite: type, test: str) -> str:
    """The sentence that a test of a suite stands for; empty for an author's own test."""
    part = suite.__mro__[place_of(suite, test)[0]]
    beginning = getattr(vars(part).get(test), "sentence", vars(part).get("sentence"))
    if not beginning:
        return ""
    text = _text_of(suite.contract)  # type: ignore[attr-defined]
    whole = re.match(r'.+?[.](?= |""")', text[text.index(beginning) :])
    return whole.group() if whole else beginning


def place_of(suite: type, test: str) -> tuple[int, int]:
    """The order of the suite's parts and of the tests in each: what much else needs comes first."""
    part = next((at for at, part in enumerate(suite.__mro__) if test in vars(part)), 0)
    return part, list(vars(suite.__mro__[part])).index(test)


def _text_of(contract: type) -> str:
    """The text of a contract and of those that it extends, with single spaces."""
    modules = [sys.modules[kind.__module__] for kind in contract.__mro__ if kind.__module__.startswith("blendhub.")]
    return " ".join(" ".join(map(inspect.getsource, modules)).split())
