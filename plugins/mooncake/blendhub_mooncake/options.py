"""The options of the store, in a separate module so that listing them imports nothing else."""

from typing import Annotated, Literal

from blendhub_fleet.options import FleetOptions
from msgspec import Meta


class MooncakeOptions(FleetOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    master: Annotated[
        str,
        Meta(
            pattern=r"^\S+:\S+$",
            description="where mooncake_master listens: HOST:PORT, or etcd://HOST:PORT if there are several",
        ),
    ] = "127.0.0.1:50051"
    address: Annotated[
        str,
        Meta(description="this machine's address for Mooncake's nodes; empty: that towards the master"),
    ] = ""
    metadata: Annotated[str, Meta(description="Mooncake's metadata server, the same for all clients and nodes")] = (
        "P2PHANDSHAKE"
    )
    protocol: Annotated[Literal["tcp", "rdma"], Meta(description="how Mooncake transfers chunks")] = "tcp"
    devices: Annotated[str, Meta(description="RDMA devices, with commas between; empty: Mooncake chooses")] = ""
    transfer_deadline_s: Annotated[float, Meta(gt=0, le=60, description="how long a call of Mooncake may take")] = 5.0
