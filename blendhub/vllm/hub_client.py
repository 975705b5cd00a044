"""A process's client of the hub."""

from blendhub.client.hub_client import HubClient
from blendhub.framework.host import PluginHost
from blendhub.vllm.messages import HubPlace


def join_hub(place: HubPlace, engine: str, rank: int, host: PluginHost) -> HubClient:
    """A client that registers by itself, as soon as the hub answers; the call returns at once."""
    address = place.address
    client = HubClient(address.endpoint, address.transport.name, address.transport.options, host=host)
    client.register(engine, place.namespace, rank, waits=False)
    return client
