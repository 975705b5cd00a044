"""``blendhub top``: shows the numbers of a running hub."""

import argparse
import contextlib
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from blendhub.cli.json_input import read_object
from blendhub.client.wire import HubStats
from blendhub.core.errors import HubError, OptionError, TransportError
from blendhub.framework.host import PluginHost
from blendhub.outcome.agreement import wilson
from blendhub.system.default_paths import default_endpoint

TIMEOUT_S = 2.0
SHORTEST_S, LONGEST_S = 0.1, 3600.0
CLEAR_SCREEN = "\x1b[H\x1b[2J"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="show the numbers of a running hub",
        description="Show hit rates, memory, leases and latencies of a running hub, updated regularly.",
    )
    parser.add_argument("--endpoint", metavar="EP", help="the hub's; default: where `blendhub serve` listens")
    parser.add_argument("--options", metavar="JSON", default="{}", help="the transport's options, such as keys")
    parser.add_argument("--interval", metavar="S", type=float, default=1.0, help="seconds between samples (default 1)")
    parser.add_argument("--once", action="store_true", help="show one sample; exits with 2 if no hub answers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not SHORTEST_S <= arguments.interval <= LONGEST_S:
        raise OptionError(
            f"--interval {arguments.interval} should be {SHORTEST_S} to {LONGEST_S:.0f} seconds; leave it out for 1"
        )
    hub = SampledHub(arguments.endpoint or default_endpoint(), read_object("--options", arguments.options))
    if arguments.once:
        print(View(hub.sample()))
        return 0
    with _interrupted() as interrupted:
        for view in _views(hub, arguments.interval, interrupted):
            if sys.stdout.isatty():
                print(f"{CLEAR_SCREEN}{hub.endpoint}  {time.strftime('%H:%M:%S')}\n")
            print(view, end="\n\n", flush=True)
    return 0


@contextlib.contextmanager
def _interrupted() -> Iterator[socket.socket]:
    """A socket that becomes readable when the user interrupts.

    An exception at any point of a sample could leave a connection half closed, and its end would wait for ever.
    """
    readable, written = socket.socketpair()
    with readable, written:
        written.setblocking(False)
        handler = signal.signal(signal.SIGINT, lambda *_: None)
        former = signal.set_wakeup_fd(written.fileno())
        try:
            yield readable
        finally:
            signal.set_wakeup_fd(former)
            signal.signal(signal.SIGINT, handler)


class Sample(msgspec.Struct, frozen=True):
    """A hub's numbers at one moment."""

    at: float
    stats: HubStats

    def counter(self, name: str) -> float:
        """The value of a counter; zero if it is missing, because a hub reports only counters that it has used."""
        return self.stats.counters.get(name, 0)

    def gauge(self, name: str) -> float:
        return self.stats.gauges.get(name, 0)


class View:
    """A sample as text, with rates since the sample before it."""

    def __init__(self, now: Sample, before: Sample | None = None) -> None:
        self._now = now
        self._before = before

    def rows(self) -> list[tuple[str, str]]:
        count, gauge = self._now.counter, self._now.gauge
        looked, found = count("requests_lookup"), count("lookups_that_found")
        size, reserved, quarantined = (
            gauge(f"arena_{name}") for name in ("bytes", "reserved_bytes", "quarantined_bytes")
        )
        used = reserved - gauge("arena_free_bytes") - quarantined
        so_far = f", {_bytes(reserved)} reserved so far" if reserved < size else ""
        refused = {name: n for name, n in self._now.stats.counters.items() if name.startswith("refused_") and n}
        rows = [
            ("lookups", f"{looked:,.0f}{self._rate('requests_lookup')}, hit rate {_share(found, looked)}"),
            ("exact", f"{count('tokens_exact'):,.0f} tokens{self._rate('tokens_exact')}"),
            ("settled", f"{count('tokens_settled'):,.0f} tokens{self._rate('tokens_settled')}"),
            ("moved", f"{count('tokens_moved'):,.0f} tokens{self._rate('tokens_moved')}"),
            (
                "arena",
                f"{_bytes(used)} of {_bytes(size)} ({_share(used, size)}), {_bytes(quarantined)} quarantined{so_far}",
            ),
            ("chunks", f"{gauge('chunks'):,.0f}, {gauge('chunks_in_arena'):,.0f} of them in the arena"),
            (
                "evictions",
                f"{count('evictions'):,.0f}{self._rate('evictions')}, {count('forgotten_chunks'):,.0f} forgotten",
            ),
            ("leases", f"{gauge('read_leases'):,.0f} for reading, {gauge('write_leases'):,.0f} for writing"),
            ("sessions", f"{gauge('sessions'):,.0f} of {gauge('engines'):,.0f} engines"),
            ("models", f"{len(self._now.stats.namespaces)}, matchers hold {_bytes(gauge('matcher_bytes'))}"),
            ("store", self._store()),
            ("agreement", self._agreement()),
            ("refused", ", ".join(f"{n:,.0f} {name[8:]}" for name, n in sorted(refused.items())) or "nothing"),
        ]
        if "fleet_hubs" in self._now.stats.gauges:
            rows.insert(-2, ("fleet", self._fleet()))
        return rows

    def latencies(self) -> list[tuple[str, str, str, str]]:
        """Kind of request, number, median and 99th percentile of the recent ones."""
        kinds = sorted(name[8:-4] for name in self._now.stats.gauges if name.startswith("seconds_") and "_p50" in name)
        return [
            (
                kind,
                f"{self._now.counter(f'requests_{kind}'):,.0f}{self._rate(f'requests_{kind}')}",
                _seconds(self._now.gauge(f"seconds_{kind}_p50")),
                _seconds(self._now.gauge(f"seconds_{kind}_p99")),
            )
            for kind in kinds
        ]

    def _store(self) -> str:
        count, gauge = self._now.counter, self._now.gauge
        return (
            f"{_bytes(gauge('store_bytes'))}, {gauge('store_waiting_chunks'):,.0f} chunks waiting, "
            f"{count('store_saves'):,.0f} saved, {count('store_loads'):,.0f} loaded, "
            f"{count('store_failures'):,.0f} failed, {count('store_corrupted'):,.0f} corrupted"
        )

    def _fleet(self) -> str:
        count, gauge = self._now.counter, self._now.gauge
        here, failed = gauge("chunks_in_arena"), count("fleet_failures") + count("store_failures")
        seen = f"{gauge('fleet_hubs'):,.0f} hubs" if gauge("fleet_in_step") else "does not answer"
        return (
            f"{seen}, {gauge('fleet_behind'):,.0f} changes behind, {here:,.0f} chunks here, "
            f"{gauge('chunks') - here:,.0f} elsewhere, {_bytes(count('fleet_fetched_bytes'))} fetched, "
            f"{_bytes(count('fleet_sent_bytes'))} sent, {failed:,.0f} failures"
        )

    def _agreement(self) -> str:
        """The agreement of each namespace that was audited lately, labelled with a few digits of its digest."""
        shares = []
        for digest, numbers in sorted(self._now.stats.namespaces.items()):
            audits = numbers.get("recent_audits", 0)
            if audits:
                agreed = audits - numbers["recent_audit_disagreements"]
                low, high = wilson(agreed, audits)
                share = f"{agreed / audits:.1%} (95%: {low:.1%} to {high:.1%}) of {audits:,.0f} recent audits"
                shares.append((digest, share))
        if len(shares) == 1:
            return shares[0][1]
        return ", ".join(f"{digest[:6]} {share}" for digest, share in shares) or "no request was audited"

    def _rate(self, name: str) -> str:
        """The growth of a counter per second since the sample before; empty if the hub was restarted meanwhile."""
        if self._before is None or self._before.stats.epoch != self._now.stats.epoch:
            return ""
        grown = self._now.counter(name) - self._before.counter(name)
        return f" ({grown / (self._now.at - self._before.at):,.0f}/s)"

    def __str__(self) -> str:
        rows = [*self.rows(), *((kind, f"{n}, p50 {p50}, p99 {p99}") for kind, n, p50, p99 in self.latencies())]
        return "\n".join(f"{name:<10} {text}" for name, text in rows)


class SampledHub:
    """A hub whose numbers are sampled, over a new connection each time: the hub may have restarted in between."""

    def __init__(self, endpoint: str, options: dict[str, Any]) -> None:
        self.endpoint = endpoint
        self._options = options
        self._host = PluginHost.discover()

    def sample(self) -> Sample:
        from blendhub.client.hub_client import HubClient

        with HubClient(self.endpoint, options=self._options, host=self._host, timeout=TIMEOUT_S) as client:
            try:
                return Sample(time.monotonic(), client.stats())
            except TransportError as error:
                raise HubError(f"no hub at {self.endpoint}: {error}") from error


def _views(hub: SampledHub, interval: float, interrupted: socket.socket) -> Iterator[View | HubError]:
    """A view or, where no hub answered, an error, once an interval until the user interrupts."""
    before: Sample | None = None
    wait = 0.0
    while not select.select([interrupted], [], [], wait)[0]:
        try:
            now = hub.sample()
        except HubError as error:
            before = None
            yield error
        else:
            yield View(now, before)
            before = now
        wait = interval


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:,.4g} {unit}"
        n /= 1024
    return f"{n:,.2f} GiB"


def _seconds(seconds: float) -> str:
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 1000 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s"
