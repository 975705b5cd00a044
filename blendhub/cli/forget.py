"""``blendhub forget``: deletes what all requests with a cache salt stored."""

import argparse
from typing import Any

from blendhub.cli.json_input import read_object
from blendhub.client.hub_client import HubClient
from blendhub.framework.host import PluginHost
from blendhub.system.default_paths import default_endpoint

ANSWER_S, DELETED_S = 5.0, 60.0
"""A hub that is not there is named soon; one that deletes in a store or a fleet has more time."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "forget",
        help="delete what requests with a cache salt stored, from memory, store and fleet",
        description="Delete the KV that all requests with a cache salt stored. It is no error if there is none.",
    )
    parser.add_argument("--salt", metavar="S", required=True, help="the cache_salt of the requests")
    parser.add_argument("--endpoint", metavar="EP", help="the hub's; default: where `blendhub serve` listens")
    parser.add_argument("--options", metavar="JSON", default="{}", help="the transport's options")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    options, endpoint = read_object("--options", arguments.options), arguments.endpoint or default_endpoint()
    with HubClient(endpoint, options=options, host=PluginHost.discover(), timeout=ANSWER_S) as client:
        client.stats().result()
        client.forget(arguments.salt, DELETED_S).result()
    print("deleted: nothing that requests with this salt stored is found again")
    return 0
