"""What Mooncake's result codes say about a key, and about the memory that was named with it."""

from enum import Enum, auto

OBJECT_NOT_FOUND = -704
REPLICA_IS_GONE = -712
NO_AVAILABLE_HANDLE = -200

MASTER_IS_AWAY = frozenset(
    {
        -900,  # it could not be reached, before the transfer or after it
        -901,  # it did not answer in time, likewise
    }
)

ENDED = MASTER_IS_AWAY | frozenset(
    {
        -600,  # invalid parameters, such as a buffer that is too small: nothing was started
        -702,  # no complete replica: nothing was started
        -703,  # the object is still being put: nothing was started
        -707,  # the lease ended before the transfer did, and both have
        -801,  # the whole object was transferred, and has another checksum
    }
)
"""Failures after which Mooncake transfers nothing more for the key."""


class CodeMeaning(Enum):
    DONE = auto()
    ABSENT = auto()
    """Mooncake does not have these bytes under this key, or has no room for them."""
    FAILED = auto()
    """The codes after which it is not known whether Mooncake has the bytes."""
    ADRIFT = auto()
    """The codes after which a transfer may also still be reading or writing the memory."""

    @property
    def is_certain(self) -> bool:
        return self in (CodeMeaning.DONE, CodeMeaning.ABSENT)


def of_get(code: int, length: int) -> CodeMeaning:
    if code == length:
        return CodeMeaning.DONE
    # A code that is not negative is the object's length: other bytes than those that were put.
    if code >= 0 or code in (OBJECT_NOT_FOUND, REPLICA_IS_GONE):
        return CodeMeaning.ABSENT
    return CodeMeaning.FAILED if code in ENDED else CodeMeaning.ADRIFT


def of_put(code: int) -> CodeMeaning:
    if code == 0:
        return CodeMeaning.DONE
    if code == NO_AVAILABLE_HANDLE:
        return CodeMeaning.ABSENT
    return CodeMeaning.FAILED if code in ENDED else CodeMeaning.ADRIFT
