"""Errors of a plugin's code name the plugin, its distribution and the method.

An object that the host made gets a class of the same name below its own, whose methods are those of the contract
with this one difference. So callers need no care, and a fault cannot pass for one of the hub or of the model.
"""

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from blendhub.contracts.device import Transfer
from blendhub.core.errors import BlendHubError, BrokenContract, PluginError

log = logging.getLogger(__name__)
CONTRACTS = "blendhub.contracts."
_ORIGIN = "__blendhub_origin__"
_PLAIN = (type(None), bool, int, list, dict)
"""The types that most methods return. Checked first, because matchers are called thousands of times a second."""

_logged: set[tuple[str, str, type]] = set()
"""Faults whose traceback is in the log."""


def guard(made: Any, contract: type, origin: str) -> Any:
    """The object, whose contract methods raise BlendHubErrors only. ``origin`` is how errors call the plugin."""
    own: Any = type(made)
    if not hasattr(own, _ORIGIN):
        # Past the class's own __setattr__: objects may be frozen.
        object.__setattr__(made, "__class__", _guarded_class(own, contract, origin))
    return made


@functools.cache
def _guarded_class(own: Any, contract: type, origin: str) -> type:
    members: dict[str, Any] = {"__slots__": (), "__module__": own.__module__, "__qualname__": own.__qualname__}
    for name in _methods(own, contract):
        member = inspect.getattr_static(own, name)
        if isinstance(member, property) and member.fget:
            members[name] = property(_guarded(member.fget, name, origin))
        elif inspect.isfunction(member):
            members[name] = _guarded(member, name, origin)
    members[_ORIGIN] = origin
    below: type = type(own)(own.__name__, (own,), members)
    return below


def _methods(own: type, contract: type) -> list[str]:
    """The methods of the contract, and of the one below it that the class fulfils, such as a shared store's."""
    contracts = [base for base in own.__mro__ if issubclass(base, contract) and base.__module__.startswith(CONTRACTS)]
    return [
        name
        for one in {contract: None, **dict.fromkeys(contracts)}
        for name, member in vars(one).items()
        if isinstance(member, property) or (inspect.isfunction(member) and (name == "__len__" or name[0] != "_"))
    ]


def _guarded(method: Callable[..., Any], name: str, origin: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        try:
            result = method(self, *given, **named)
        except BrokenContract as error:
            raise PluginError(f"{origin} failed in {name}: {error}") from error
        except BlendHubError:
            raise
        except Exception as error:
            raise named_error(origin, name, error) from error
        return result if type(result) in _PLAIN else _guarded_result(result, name, origin)

    return call


def _guarded_result(result: Any, name: str, origin: str) -> Any:
    """Guards results that run more of the plugin's code: iterators and awaitables."""
    if isinstance(result, Transfer):
        return guard(result, Transfer, origin)
    if inspect.isgenerator(result):
        return _iterated(result, name, origin)
    if inspect.iscoroutine(result):
        return _awaited(result, name, origin)
    return result


def _iterated(items: Iterator[Any], name: str, origin: str) -> Iterator[Any]:
    with _blaming(name, origin):
        yield from items


async def _awaited(work: Awaitable[Any], name: str, origin: str) -> Any:
    with _blaming(name, origin):
        return await work


@contextmanager
def _blaming(name: str, origin: str) -> Iterator[None]:
    try:
        yield
    except BlendHubError:
        raise
    except Exception as error:
        raise named_error(origin, name, error) from error


def named_error(origin: str, name: str, error: BaseException) -> PluginError:
    """An error of a plugin's code as one that names the plugin and the method; its traceback is logged once."""
    fault = PluginError(f"{origin} failed in {name}: {type(error).__name__}: {error}")
    if (origin, name, type(error)) not in _logged:
        _logged.add((origin, name, type(error)))
        log.error("%s", fault, exc_info=error)
    return fault
