"""A suite that nothing fails is worth nothing: plugins with one fault each, and the test that must fail with each."""

import ast
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from blendhub.testing.sentences import place_of, sentence_of

DOCUMENTED = (ast.ClassDef, ast.FunctionDef)
CAUGHT: set[str] = set()
"""The sentences of contracts that a plugin breaks in a table that is imported."""


def all_tests(suite: type) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_")}


def paragraphs_of(module: ModuleType) -> list[str]:
    """The paragraphs of a contract that have a name: what each plugin promises."""
    documented = (node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, DOCUMENTED))
    texts = [" ".join(text.split()) for node in documented for text in (ast.get_docstring(node) or "").split("\n\n")]
    return [text for text in texts if re.match(r"[*]\w", text)]


def proofs(suite: Any, faults: Mapping[str, Sequence[Callable[..., Any]]]) -> dict[str, type]:
    """A class for each faulty plugin, which pytest collects: its one test passes if that test of the suite fails.

    A fault takes the place of the suite's ``create``. Every part of the suite needs one, and every named paragraph of
    the contract: see test_sentences.
    """
    CAUGHT.update(sentence_of(suite, test) for test in faults)
    tests = all_tests(suite)
    assert {place_of(suite, test)[0] for test in faults} == {place_of(suite, test)[0] for test in tests}
    # In one order, or the processes that run tests collect others.
    hidden = {"pytestmark": pytest.mark.usefixtures("without_shrinking"), **dict.fromkeys(sorted(tests))}
    made: dict[str, type] = {}
    for test, plugin in [(test, plugin) for test, plugins in faults.items() for plugin in plugins]:
        name = f"Test{len(made)}"
        body = {"create": plugin, "__module__": suite.__module__, test: _must_fail(suite, test)}
        made[name] = type(name, (suite,), hidden | body)
    return made


def _must_fail(suite: type, name: str) -> Callable[..., None]:
    test = getattr(suite, name)

    @functools.wraps(test)
    def passes_if_it_fails(*arguments: Any, **fixtures: Any) -> None:
        try:
            test(*arguments, **fixtures)
        except (AttributeError, NameError, TypeError):  # a fault that cannot even run proves nothing
            raise
        except (Exception, pytest.fail.Exception):
            return
        pytest.fail(f"{name} lets a faulty plugin pass")

    return passes_if_it_fails
