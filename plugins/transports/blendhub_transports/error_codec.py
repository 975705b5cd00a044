"""Errors on their way to the caller: a class name and a sentence, and nothing else, leave the server."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from blendhub import errors
from blendhub.errors import BlendHubError, ProtocolError, ServiceFailed

LONGEST_SENTENCE = 4000

_TELLABLE: Mapping[str, type[BlendHubError]] = MappingProxyType(
    {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BlendHubError)}
)

_decoder = msgspec.msgpack.Decoder(tuple[str, str])


def service_failure(error: BaseException) -> ServiceFailed:
    """What the caller is told of an exception that is no BlendHubError."""
    return ServiceFailed(f"the service raised {type(error).__name__}: {error}; its log has the details")


def encode_error(error: BlendHubError) -> bytes:
    """The error as bytes; one of a plugin's own class travels as the nearest class that every side knows."""
    name = next(kind.__name__ for kind in type(error).__mro__ if _TELLABLE.get(kind.__name__) is kind)
    return msgspec.msgpack.encode((name, str(error)[:LONGEST_SENTENCE]))


def decode_error(body: memoryview) -> BlendHubError:
    """The error that these bytes tell of; only classes of :mod:`blendhub.errors` are made from a name."""
    try:
        name, sentence = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return ProtocolError(f"the server answered with an error that does not decode: {error}")
    return _TELLABLE.get(name, ServiceFailed)(sentence)
