"""Encodes errors for the caller: only a class name and a sentence leave the server."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from blendhub.core import errors
from blendhub.core.errors import BlendHubError, ProtocolError, ServiceFailed

LONGEST_SENTENCE = 4000

_KNOWN: Mapping[str, type[BlendHubError]] = MappingProxyType(
    {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BlendHubError)}
)

_decoder = msgspec.msgpack.Decoder(tuple[str, str])


def service_failure(error: BaseException) -> ServiceFailed:
    """The error that the caller gets for an exception that is not a BlendHubError."""
    return ServiceFailed(f"the service raised {type(error).__name__}: {error}; its log has the details")


def encode_error(error: BlendHubError) -> bytes:
    """The error as bytes; a plugin's class is sent as its nearest base class in :mod:`blendhub.core.errors`."""
    name = next(kind.__name__ for kind in type(error).__mro__ if _KNOWN.get(kind.__name__) is kind)
    return msgspec.msgpack.encode((name, str(error)[:LONGEST_SENTENCE]))


def decode_error(body: memoryview) -> BlendHubError:
    """The error in these bytes; only classes of :mod:`blendhub.core.errors` are created from a name."""
    try:
        name, sentence = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return ProtocolError(f"the server answered with an error that does not decode: {error}")
    return _KNOWN.get(name, ServiceFailed)(sentence)
