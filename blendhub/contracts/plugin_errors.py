"""Errors of a plugin's code name the plugin, its distribution and the method.

So callers need no care, and a fault of a plugin cannot pass for one of the hub or of the model.
"""

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from blendhub.core.errors import BlendHubError, BrokenContract, PluginError

log = logging.getLogger(__name__)
CONTRACTS = "blendhub.contracts."
_PLAIN = (type(None), bool, int, list, dict)
"""The types that most methods return. Checked first, because matchers are called thousands of times a second."""

_logged: set[tuple[str, str, type]] = set()
"""Faults whose traceback is in the log."""


class Guarded:
    """Base of the contracts whose objects plugins make.

    The contract's methods are wrapped when a class is defined. In an object with an origin, they raise BlendHubErrors
    only; without one, as in a plugin's own tests, every error stays what it is.
    """

    plugin_origin = ""
    """How errors call the plugin; set by :func:`blame`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in _methods(cls):
            member = inspect.getattr_static(cls, name)
            if isinstance(member, property) and _is_to_wrap(member.fget):
                setattr(cls, name, member.getter(_guarded(member.fget, name)))
            elif _is_to_wrap(member):
                setattr(cls, name, _guarded(member, name))


def blame(made: Any, origin: str) -> None:
    """Have errors of the object's code name the plugin, which is called ``origin``."""
    # Past the class's own __setattr__: objects may be frozen.
    object.__setattr__(made, "plugin_origin", made.plugin_origin or origin)


def _methods(own: type) -> set[str]:
    """The names of the methods of all contracts that the class fulfils, such as a store's and a shared store's."""
    return {
        name
        for base in own.__mro__
        if base is not Guarded and base.__module__.startswith(CONTRACTS)
        for name, member in vars(base).items()
        if isinstance(member, property) or (inspect.isfunction(member) and (name == "__len__" or name[0] != "_"))
    }


def _is_to_wrap(method: Any) -> bool:
    is_own = inspect.isfunction(method) and not getattr(method, "__isabstractmethod__", False)
    return is_own and not hasattr(method, "is_guarded")


def _guarded(method: Any, name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Guarded, *given: Any, **named: Any) -> Any:
        try:
            result = method(self, *given, **named)
        except Exception as error:
            _raise_named(self.plugin_origin, name, error)
        return result if type(result) in _PLAIN or not self.plugin_origin else _guarded_result(result, name, self)

    call.is_guarded = True  # type: ignore[attr-defined]
    return call


def _guarded_result(result: Any, name: str, owner: Guarded) -> Any:
    """Guards results that run more of the plugin's code: objects of another contract, iterators and awaitables."""
    if isinstance(result, Guarded):
        blame(result, owner.plugin_origin)
    elif inspect.isgenerator(result):
        return _iterated(result, name, owner.plugin_origin)
    elif inspect.iscoroutine(result):
        return _awaited(result, name, owner.plugin_origin)
    return result


def _iterated(items: Iterator[Any], name: str, origin: str) -> Iterator[Any]:
    with _naming(name, origin):
        yield from items


async def _awaited(work: Awaitable[Any], name: str, origin: str) -> Any:
    with _naming(name, origin):
        return await work


@contextmanager
def _naming(name: str, origin: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _raise_named(origin, name, error)


def _raise_named(origin: str, name: str, error: Exception) -> NoReturn:
    if origin and isinstance(error, BrokenContract):
        raise PluginError(f"{origin} failed in {name}: {error}") from error
    if not origin or isinstance(error, BlendHubError):
        raise error
    raise named_error(origin, name, error) from error


def named_error(origin: str, name: str, error: BaseException) -> PluginError:
    """An error of a plugin's code as one that names the plugin and the method; its traceback is logged once."""
    fault = PluginError(f"{origin} failed in {name}: {type(error).__name__}: {error}")
    if (origin, name, type(error)) not in _logged:
        _logged.add((origin, name, type(error)))
        log.error("%s", fault, exc_info=error)
    return fault
