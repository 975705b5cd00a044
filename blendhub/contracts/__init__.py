"""What each kind of plugin must do; the docstrings are the specification."""

from blendhub.contracts.device import Device, PagedLayer, PageFormat, Rotation, Segment, Transfer
from blendhub.contracts.matcher import Matcher
from blendhub.contracts.selection import Selection
from blendhub.contracts.selector import Selector
from blendhub.contracts.store import RunKey, Store, StoredRun
from blendhub.contracts.transport import Codec, Connection, Envelope, Pending, Server, Service, Transport

__all__ = [
    "Codec",
    "Connection",
    "Device",
    "Envelope",
    "Matcher",
    "PageFormat",
    "PagedLayer",
    "Pending",
    "Rotation",
    "RunKey",
    "Segment",
    "Selection",
    "Selector",
    "Server",
    "Service",
    "Store",
    "StoredRun",
    "Transfer",
    "Transport",
]
