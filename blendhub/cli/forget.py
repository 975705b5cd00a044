"""``blendhub forget``: deletes what a request stored, or what all requests with a cache salt stored."""

import argparse
from typing import Any

import msgspec

from blendhub.cli.json_input import read_object
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import OptionError
from blendhub.framework.host import PluginHost
from blendhub.system.default_paths import default_endpoint

ANSWER_S, DELETED_S = 5.0, 60.0
"""A hub that is not there is named soon; one that deletes in a store or a fleet has more time."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "forget",
        help="delete what a request stored, from memory, store and fleet",
        description="Delete the KV that a request computed and stored, or that all requests with a cache salt did, and "
        "print how much that was. KV that other requests computed stays. It is no error if nothing is there to delete.",
    )
    parser.add_argument("request", metavar="REQUEST", nargs="?", help="a request's id, as its response has it")
    parser.add_argument("--salt", metavar="S", help="of all requests with this cache_salt")
    parser.add_argument("--endpoint", metavar="EP", help="the hub's; default: where `blendhub serve` listens")
    parser.add_argument("--options", metavar="JSON", default="{}", help="the transport's options, such as keys")
    parser.add_argument("--json", action="store_true", help="print the receipt as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.request) == bool(arguments.salt):
        raise OptionError("name one: a request's id, or --salt with a cache salt that is not empty")
    options, endpoint = read_object("--options", arguments.options), arguments.endpoint or default_endpoint()
    with HubClient(endpoint, options=options, host=PluginHost.discover(), timeout=ANSWER_S) as client:
        client.stats()
        gone = client.forget(request=arguments.request or "", salt=arguments.salt or "", timeout=DELETED_S)
    if arguments.json:
        print(msgspec.json.encode({"tokens": gone.tokens, "chunks": gone.chunks}).decode())
    else:
        print(f"{gone.tokens:,} tokens in {gone.chunks:,} chunk{'s' * (gone.chunks != 1)} are deleted")
    return 0
