"""What each kind of plugin must do; the docstrings are the specification.

A paragraph with a name, such as *Threads*, is what every plugin of the kind promises: a suite tests it, and finds a
plugin that breaks it. What stands outside of these is for callers, or says what a method does.
"""

from blendhub.contracts.attention import AttentionRules, ChosenAttention, ChosenTokens
from blendhub.contracts.command import Command
from blendhub.contracts.device import ArenaProgress, Device, Transfer
from blendhub.contracts.matcher import Matcher
from blendhub.contracts.pages import PagedLayer, PageFormat, Rotation
from blendhub.contracts.segments import PageSegment, Segment
from blendhub.contracts.selection import Scores, Selection
from blendhub.contracts.selector import KeysAndValues, Selector, checked_picks
from blendhub.contracts.shared_store import ArenaFile, Changes, Deleted, Dropped, Published, Share, SharedStore
from blendhub.contracts.store import RunKey, Store, StoredRun
from blendhub.contracts.transport import Buffer, Codec, Connection, Envelope, Peer, Pending, Server, Service, Transport

__all__ = [
    "ArenaFile",
    "ArenaProgress",
    "AttentionRules",
    "Buffer",
    "Changes",
    "ChosenAttention",
    "ChosenTokens",
    "Codec",
    "Command",
    "Connection",
    "Deleted",
    "Device",
    "Dropped",
    "Envelope",
    "KeysAndValues",
    "Matcher",
    "PageFormat",
    "PageSegment",
    "PagedLayer",
    "Peer",
    "Pending",
    "Published",
    "Rotation",
    "RunKey",
    "Scores",
    "Segment",
    "Selection",
    "Selector",
    "Server",
    "Service",
    "Share",
    "SharedStore",
    "Store",
    "StoredRun",
    "Transfer",
    "Transport",
    "checked_picks",
]
