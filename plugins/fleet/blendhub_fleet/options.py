"""The options of shared stores, in a separate module so that listing them imports nothing else."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of every shared store with a catalogue in Redis."""

    catalogue: Annotated[
        str,
        Meta(
            pattern="^(rediss?|unix)://",
            description="Redis: redis://HOST:PORT, unix://PATH, or with TLS rediss://:PASSWORD@HOST:PORT/0",
        ),
    ] = "redis://127.0.0.1:6379"
    group: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$",
            description="hubs of a group follow each other; give each set of models its own",
        ),
    ] = "default"
    share: Annotated[
        Literal["all", "reused"], Meta(description="which chunks go out: all, or those that a prompt asks for again")
    ] = "all"
    rate_mib_s: Annotated[float, Meta(ge=0, description="the most MiB a second that this hub sends; 0: any")] = 0.0
    capacity_gib: Annotated[
        float,
        Meta(gt=0, le=2**33, description="the most that is catalogued; what was longest not used is dropped for all"),
    ] = 256.0
    log_length: Annotated[
        int,
        Meta(ge=1, le=2**32, description="changes that Redis keeps; a hub further behind reads the whole catalogue"),
    ] = 2**17
    deadline_s: Annotated[float, Meta(gt=0, le=60, description="how long a call of Redis may take")] = 2.0


class DirectoryOptions(FleetOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(description="the directory, with the same files for every hub of the group")] = ""
    unix_group: Annotated[
        str,
        Meta(description="a Unix group, by name or number, whose members may use the files; empty: only this user"),
    ] = ""
    transfer_deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            le=60,
            description="how long a step, such as copying a MiB, may take",
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is needed: a directory that every hub of the group mounts")
