"""A suite that nothing fails is worth nothing: plugins with one fault each, and the test that must fail with each."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def all_tests(suite: type) -> set[str]:
    """The tests of a suite, each of which a faulty plugin has to prove."""
    return {name for name in dir(suite) if name.startswith("test_")}


def proofs(suite: Any, faults: Iterable[tuple[type, str]]) -> dict[str, type]:
    """A class for each faulty plugin, which pytest collects: its tests pass if those of the suite fail.

    ``suite`` makes its plugin of its attribute ``plugin``.
    """
    tests: dict[type, dict[str, object]] = {}
    for plugin, test in faults:
        hidden = dict.fromkeys(sorted(all_tests(suite)))  # in one order, or the processes that run tests collect others
        tests.setdefault(plugin, {**hidden, "plugin": plugin, "__module__": suite.__module__})[test] = _must_fail(
            getattr(suite, test), f"{test} lets {plugin.__name__} pass"
        )
    return {f"Test{plugin.__name__}": type(f"Test{plugin.__name__}", (suite,), body) for plugin, body in tests.items()}


def _must_fail(test: Callable[..., None], complaint: str) -> Callable[..., None]:
    @functools.wraps(test)
    def passes_if_it_fails(*arguments: Any, **fixtures: Any) -> None:
        try:
            test(*arguments, **fixtures)
        except (Exception, pytest.fail.Exception):
            return
        pytest.fail(complaint)

    return passes_if_it_fails
