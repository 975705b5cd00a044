"""Documents that one machine's engine computed, asked for on another: how soon the answer starts."""

import contextlib
from functools import partial
from pathlib import Path

from benchmarks.quality.serving import SETTINGS
from benchmarks.report import Row, row
from benchmarks.timing import progress
from benchmarks.ttft import DOCUMENT_TOKENS, DOCUMENTS, OPTIONS, Texts, first_token_s, make_model
from blendhub.client.hub_client import HubClient
from harness.engines import Engine
from harness.servers.mooncake_cluster import Cluster, wait_until
from harness.servers.redis_server import RedisServer
from harness.servers.served_hub import START_S, ServedHub, has_followed

ARENA_GIB = 1.0
NODE_BYTES = 2**30
FOLLOWED_S = 60.0
BAR = 0.40


def rows(server: RedisServer, place: Path, *, quick: bool) -> list[Row]:
    place.mkdir()
    ratios = []
    with contextlib.ExitStack() as closing:
        cluster = closing.enter_context(Cluster())
        cluster.start_master()
        cluster.start_node(NODE_BYTES)
        fleet = {"master": cluster.address, "catalogue": server.url, "deadline_s": "20", "transfer_deadline_s": "20"}
        hubs = [
            closing.enter_context(contextlib.closing(ServedHub(place, name, ARENA_GIB, fleet)))
            for name in ("one", "other")
        ]
        clients = [closing.enter_context(HubClient(hub.endpoint)) for hub in hubs]
        for client in clients:
            wait_until(client.stats, START_S)
        model = make_model(place, quick)
        plain = closing.enter_context(Engine(model, **OPTIONS))
        one, other = (
            closing.enter_context(Engine(model, SETTINGS | {"endpoint": hub.endpoint}, **OPTIONS)) for hub in hubs
        )
        for number in progress(range(-1, 2 if quick else 7), "elsewhere"):
            # Documents that the other machine has not fetched before.
            texts = Texts(100 + number)
            for document in texts.documents:
                one.one(document, mode="exact")
                one.forget()
            wait_until(partial(has_followed, *clients), FOLLOWED_S)
            full = first_token_s(plain, texts.shuffled(), {})
            other.forget()
            answer = other.one(texts.shuffled(), recompute_ratio=0.15, store=False)
            if answer.report["moved_tokens"] < 0.9 * DOCUMENTS * DOCUMENT_TOKENS:
                raise SystemExit(f"the documents of another machine were not reused: {answer.report}")
            if number >= 0:  # the first round warms up
                ratios.append(answer.first_token_s / full)
    what = "moved documents of another machine, 15% recomputed: time to first token, relative to full prefill"
    return [row("ttft_elsewhere", what, "x", ratios, BAR, "lower")]
