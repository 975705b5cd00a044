"""What each kind of plugin must do; the docstrings are the specification."""

from blendhub.contracts.matcher import Matcher
from blendhub.contracts.store import RunKey, Store, StoredRun
from blendhub.contracts.transport import Codec, Connection, Parcel, Pending, Server, Service, Transport

__all__ = [
    "Codec",
    "Connection",
    "Matcher",
    "Parcel",
    "Pending",
    "RunKey",
    "Server",
    "Service",
    "Store",
    "StoredRun",
    "Transport",
]
