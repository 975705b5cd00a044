"""The errors that BlendHub raises, with one base class.

Messages follow one pattern: what was given, what was expected, what to do next.
"""


class BlendHubError(Exception):
    """Base of every error that BlendHub raises itself."""


class InvalidInput(BlendHubError, ValueError):
    """An argument breaks a contract. Nothing was changed."""


class OptionError(BlendHubError, ValueError):
    """A plugin's option is unknown, has the wrong type, or is out of range."""


class PluginError(BlendHubError):
    """A plugin cannot be used: it is missing, broken, ambiguous, or cannot run here."""


class BrokenContract(PluginError):
    """A plugin's method returned what its contract forbids."""


class TransportError(BlendHubError):
    """A request did not get a proper reply."""


class DeadlineExceeded(TransportError, TimeoutError):
    """No reply came by the request's deadline."""


class PeerGone(TransportError, ConnectionError):
    """The other side died, left, or closed the connection before it replied."""


class Busy(TransportError):
    """A queue is full; the request was not started and may be tried again."""


class ProtocolError(TransportError):
    """The peer sent something that is not a message of this protocol."""


class VersionMismatch(ProtocolError):
    """The two sides speak different versions; one of them must be upgraded."""


class ServiceFailed(TransportError):
    """The service failed while answering; its log has the details."""


class StoreFailed(BlendHubError):
    """A store could not write or read for a reason outside it, such as a full disk."""


class StoreAway(StoreFailed):
    """A store, or what it needs, does not answer now; the same call may be tried again later."""


class CursorLost(StoreFailed):
    """A shared store no longer knows all that happened after a cursor; take a new snapshot."""


class HubError(BlendHubError):
    """A hub refused a request."""


class UnknownSession(HubError):
    """The session is not registered with this hub, perhaps because the hub restarted; register again."""


class StaleEpoch(HubError):
    """A lease, session or right belongs to an earlier start of the hub or an earlier registration."""


class LeaseError(HubError):
    """A lease does not exist, has ended, or belongs to another session."""


class LayoutMismatch(HubError):
    """Two registrations that must agree differ; the message names the differences."""


class ArenaFull(HubError):
    """No slot is free and nothing can be evicted now; try again later, or enlarge the arena."""


class AdapterReplaced(BlendHubError):
    """A LoRA adapter's weights are not, or may not be, those that the KV at hand was computed with."""


class Unsupported(BlendHubError):
    """A model, page format or feature is not supported; the message says what still works."""


def reason_of(error: Exception) -> str:
    """Why something failed, for a message that names the file or address itself: without an error number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
