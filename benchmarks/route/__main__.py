"""A router that asks the hubs, beside one that remembers where it sent each beginning of a prompt.

Both have engines that reuse text anywhere, played without KV. All arenas together hold the documents once, or the open
chats four times: old turns leave chunks behind.
"""

from typing import NamedTuple

from benchmarks.report import Row, arguments, finish, row
from benchmarks.route.routers import AskingRouter, PrefixAffineRouter, Routed, route
from benchmarks.route.traces import CHAT_TOKENS, CHUNK, DOCUMENT_TOKENS, Trace
from benchmarks.timing import progress
from blendhub.framework.host import PluginHost

ENGINES = (2, 4, 8, 16, 32, 64)
PROMPTS = 200
"""For each engine."""
SEEDS = (0, 1, 2)
"""The seeds of traces for few engines; for many, one trace says enough."""
FEW = 16
NO_WORSE = 0.99
"""Traces of the same kind differ by one per cent."""
ROOM = {"documents": DOCUMENT_TOKENS * 5 // 4, "chats": CHAT_TOKENS * 4}
"""The tokens for which each engine's arena has slots. Chunks at the ends of documents are partly empty."""


class Compared(NamedTuple):
    """What the asking router and the prefix-affine one achieve with the same trace."""

    asking: Routed
    affine: Routed


def main() -> None:
    options = arguments(__doc__ or "")
    engines, prompts, seeds = (ENGINES[:2], 40, SEEDS[:1]) if options.quick else (ENGINES, PROMPTS, SEEDS)
    host = PluginHost.discover()
    rows: list[Row] = []
    for kind, what, bar in (("documents", "moved documents", 1.5), ("chats", "chats", NO_WORSE)):
        for n in progress(engines, kind):
            rows += _rows(
                kind,
                what,
                n,
                [_compared(host, kind, n, prompts, seed) for seed in seeds[: None if n <= FEW else 1]],
                bar,
            )
    finish("route", rows, ["python", "numpy", "numba", "blendhub", "blendhub-matchers"], options.json)


def _compared(host: PluginHost, kind: str, n: int, prompts: int, seed: int) -> Compared:
    asking, affine = (
        route(router, host, getattr(Trace(n, seed), kind)(), prompts, n, ROOM[kind] // CHUNK)
        for router in (AskingRouter, PrefixAffineRouter)
    )
    print(
        f"{kind}, {n} engines: {asking.reused / asking.tokens:.0%} reused, greatest load "
        f"{asking.greatest_load:.2f}; prefix-affine {affine.reused / affine.tokens:.0%}, {affine.greatest_load:.2f}"
    )
    return Compared(asking, affine)


def _rows(kind: str, what: str, n: int, compared: list[Compared], bar: float) -> list[Row]:
    ratios = [asking.reused / affine.reused for asking, affine in compared]
    loads = [asking.greatest_load for asking, _ in compared]
    shares = [asking.reused / asking.tokens for asking, _ in compared]
    engines = f"{what}, {n} engines"
    return [
        row(f"route_{kind}_{n}", f"tokens reused, relative to a prefix-affine router: {engines}", "x", ratios, bar),
        row(f"route_{kind}_load_{n}", f"greatest load, relative to the mean: {engines}", "x", loads, 1.2, "lower"),
        row(f"route_{kind}_share_{n}", f"share of the prompts' tokens that is reused: {engines}", "", shares),
    ]


if __name__ == "__main__":
    main()
