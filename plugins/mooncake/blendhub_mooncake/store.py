"""The store that this distribution offers: the fleet's catalogue, with its bytes in Mooncake."""

from blendhub_fleet.store import FleetStore

from blendhub.contracts import ArenaFile
from blendhub_mooncake.bytes import MooncakeBytes
from blendhub_mooncake.frames import Setup
from blendhub_mooncake.options import MooncakeOptions


def open_store(options: MooncakeOptions) -> FleetStore:
    def open_bytes(arena: ArenaFile) -> MooncakeBytes:
        setup = Setup(arena, options.master, options.address, options.metadata, options.protocol, options.devices)
        return MooncakeBytes(setup, options.transfer_deadline_s)

    return FleetStore(options, open_bytes)
