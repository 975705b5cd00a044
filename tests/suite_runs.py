"""A suite that nothing fails is worth nothing: plugins with one fault each, and the test that must fail with each."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from blendhub.testing.sentences import place_of


def all_tests(suite: type) -> set[str]:
    """The tests of a suite, each of which a faulty plugin has to prove."""
    return {name for name in dir(suite) if name.startswith("test_")}


def proofs(
    suite: Any,
    faults: Mapping[str, Sequence[Callable[..., Any]]],
    part_for: Callable[[Any], Any] | None = None,
) -> dict[str, type]:
    """A class for each faulty plugin, which pytest collects: its one test passes if that test of the suite fails.

    ``suite`` makes its plugin of its attribute ``plugin``. Every part of the suite needs a fault. ``part_for``: the
    part of the suite for a plugin, where not all of it is for each.
    """
    tests = all_tests(suite)
    assert {place_of(suite, test)[0] for test in faults} == {place_of(suite, test)[0] for test in tests}
    hidden = dict.fromkeys(sorted(tests))  # in one order, or the processes that run tests collect others
    made: dict[str, type] = {}
    for test, plugin in [(test, plugin) for test, plugins in faults.items() for plugin in plugins]:
        part, name = part_for(plugin) if part_for else suite, f"Test{len(made)}"
        body = {"plugin": staticmethod(plugin), "__module__": suite.__module__, test: _must_fail(part, test)}
        made[name] = type(name, (part,), hidden | body)
    return made


def _must_fail(suite: type, name: str) -> Callable[..., None]:
    test = getattr(suite, name)

    @functools.wraps(test)
    def passes_if_it_fails(*arguments: Any, **fixtures: Any) -> None:
        try:
            test(*arguments, **fixtures)
        except (AttributeError, NameError):  # a fault that cannot even run proves nothing
            raise
        except (Exception, pytest.fail.Exception):
            return
        pytest.fail(f"{name} lets a faulty plugin pass")

    return passes_if_it_fails
