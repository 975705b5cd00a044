"""``blendhub warm``: computes a corpus before users ask about it."""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from blendhub.cli.json_input import read_object
from blendhub.core.errors import BlendHubError, InvalidInput, OptionError, reason_of
from blendhub.framework.host import PluginHost
from blendhub.system.default_paths import default_endpoint
from blendhub.system.served_vllm import transfer_config
from blendhub.tools.warm.documents import TEXT, Corpus, Document
from blendhub.tools.warm.own_server import OwnServer
from blendhub.tools.warm.pace import Pace
from blendhub.tools.warm.prompts import Prompts
from blendhub.tools.warm.server import Server
from blendhub.tools.warm.stored import Stored
from blendhub.tools.warm.verify import verify
from blendhub.tools.warm.warming import EXACT, Stopped, Tally, Warming
from blendhub.vllm.settings import KEY, OWNER, mistakes_in_settings

CONTEXTS = 2
SAID_EVERY_S = 30.0
"""How often progress is written where standard error is no terminal."""
WARNING = 3


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "warm",
        help="compute a corpus before users ask about it",
        description="Compute every document of a corpus and store its KV, so that the first question to it is answered "
        "from stored KV. Started again, the command computes only what the hub does not have. Exits with 3 if some "
        "documents could not be computed or did not fit.",
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="URL", help="vLLM's server with BlendHub, such as http://localhost:8000")
    where.add_argument("--model", metavar="M", help="no server: start vLLM for it, and fill the store of --settings")
    add("--data", required=True, metavar="PATH", help="a file of JSON lines, CSV or Parquet, a folder, or -")
    add("--column", default=TEXT, metavar="NAME", help=f"of CSV and Parquet: has the documents (default {TEXT})")
    add("--system", type=Path, metavar="FILE", help="the system text before the documents of your service")
    add("--contexts", type=int, choices=(1, 2), default=CONTEXTS, help="of each document; 1: alone (default 2)")
    add("--concurrency", type=int, metavar="N", help="requests at a time; default: what the server sustains")
    add("--verify", type=int, default=0, metavar="N", help="audit so many blends of documents, and print the agreement")
    add("--cache-salt", default="", metavar="SALT", help="the salt of the requests that will ask")
    add("--hub", metavar="EP", help="the server's hub; default: where `blendhub serve` listens, if it is that one")
    add("--options", default="{}", metavar="JSON", help="the transport's options for --hub, such as keys")
    add("--engine", default="{}", metavar="JSON", help="with --model: vLLM's arguments, such as max_model_len")
    add("--settings", default="{}", metavar="JSON", help=f"with --model: as in {OWNER}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.concurrency is not None and arguments.concurrency < 1:
        raise OptionError(f"--concurrency {arguments.concurrency} should be at least 1")
    if arguments.verify < 0:
        raise OptionError(f"--verify {arguments.verify} should be at least 0")
    engine, settings = (read_object(f"--{name}", getattr(arguments, name)) for name in ("engine", "settings"))
    if arguments.model:
        _check_settings(settings)
    corpus = Corpus(arguments.data, arguments.column)
    documents = corpus.read()
    stop = threading.Event()
    with _stopped_by_signals(stop) as stopped_by:
        if arguments.server:
            code = _warm(arguments, corpus, documents, arguments.server, arguments.hub, stop)
        else:
            with tempfile.TemporaryDirectory(prefix="blendhub-warm-") as place:
                endpoint, settings = _reachable(settings, place)
                with OwnServer(arguments.model, engine, transfer_config(settings)) as server:
                    print(f"starting vLLM for {arguments.model}", file=sys.stderr)
                    server.wait_until_up(stop)
                    if not stop.is_set():
                        code = _warm(arguments, corpus, documents, server.url, endpoint, stop)
    return 128 + stopped_by[0] if stopped_by else code


def _warm(
    arguments: argparse.Namespace,
    corpus: Corpus,
    documents: list[Document],
    url: str,
    endpoint: str | None,
    stop: threading.Event,
) -> int:
    server = Server(url, os.environ.get("VLLM_API_KEY", ""))
    prompts = Prompts(server, _system(arguments.system))
    options = read_object("--options", arguments.options)
    stored = _stored(server, prompts, endpoint, options, arguments.cache_salt)
    with contextlib.closing(stored) if stored else contextlib.nullcontext():
        pace = Pace(arguments.concurrency)
        warming = Warming(documents, server, prompts, stored=stored, salt=arguments.cache_salt, pace=pace, stop=stop)
        started = time.monotonic()
        with _progress(len(documents) * arguments.contexts, "computing") as advance:
            warming.run(arguments.contexts, advance)
        _say(_done(warming.tally, len(documents), time.monotonic() - started))
        if corpus.copies:
            _say(f"{corpus.copies:,} more documents have the text of another one.")
        if warming.tally.long:
            _say(
                f"{warming.tally.long:,} documents are computed in parts: a prompt of {server.longest:,} tokens does "
                "not hold two of them; vLLM's --max-model-len enlarges it."
            )
        left_out = _left_out(corpus, warming.tally)
        for line in left_out:
            _say(line)
        if stop.is_set():
            _say("Stopped: the same command goes on from here.")
            return 0
        missing = 0
        with contextlib.suppress(Stopped):
            missing, looked_at = warming.missing(arguments.contexts)
            if missing:
                _say(_not_fitting(missing, looked_at, stored))
            if arguments.model and stored and not stored.wait_until_saved():
                _say("The store does not take all that was computed: see the log of its server, and repeat this.")
                missing += 1
            if arguments.verify:
                with _progress(arguments.verify, "verifying") as advance:
                    agreement = verify(warming, prompts, documents, arguments.verify, advance)
                _say(str(agreement))
    return WARNING if missing or left_out else 0


def _stored(
    server: Server, prompts: Prompts, endpoint: str | None, options: dict[str, Any], salt: str
) -> Stored | None:
    """The server's hub; None if only the server itself can ask it. Checks that the server has BlendHub."""
    probe = server.complete(prompts.asking([], "Hello"), EXACT | {"store": False}, salt)
    try:
        return Stored.find(endpoint or default_endpoint(), options, probe.id, salt)
    except BlendHubError as error:
        if endpoint:
            raise
        _say(
            f"What is warm already is asked of the server, which takes longer than asking its hub: {error}; see --hub."
        )
        return None


def _system(file: Path | None) -> str:
    try:
        return file.read_text(encoding="utf-8").strip("\n") if file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--system {file} cannot be read: {reason_of(error)}") from None


def _check_settings(settings: dict[str, Any]) -> None:
    if mistakes := mistakes_in_settings({KEY: settings}, PluginHost.discover(), None):
        raise OptionError("; also: ".join(f"--settings: {mistake}" for mistake in mistakes))
    store = settings.get("hub", {}).get("store")
    if not (store or settings.get("endpoint")):
        raise OptionError(
            "--model: what is computed would end with this command; name a store in --settings, such as "
            '\'{"hub": {"store": {"name": "disk"}}}\', or the endpoint of a running hub'
        )
    if store and store.get("options", {}).get("share") == "reused":
        raise OptionError('--settings: the store keeps only what is asked for again; set its "share" to "all" for this')


def _reachable(settings: dict[str, Any], place: str) -> tuple[str, dict[str, Any]]:
    """Where the hub can be asked, and the settings with which it listens there."""
    if settings.get("endpoint"):
        return settings["endpoint"], settings
    endpoint, hub = f"ipc://{place}/hub.sock", settings["hub"]
    return endpoint, settings | {"hub": hub | {"listen": [*hub.get("listen", []), {"endpoint": endpoint}]}}


def _done(tally: Tally, documents: int, seconds: float) -> str:
    rate = tally.computed_tokens / max(seconds, 1e-9)
    return (
        f"{documents:,} documents: {tally.computed:,} contexts are computed, {tally.computed_tokens:,} tokens, "
        f"{rate:,.0f} a second; {tally.warm:,} contexts were warm."
    )


def _left_out(corpus: Corpus, tally: Tally) -> list[str]:
    lines = []
    for broken in (corpus.broken, tally.failed):
        if broken:
            place, reason = broken.named[0]
            lines.append(f"{len(broken):,} documents are left out; the first one, {place}, {reason}")
    return lines


def _not_fitting(missing: int, looked_at: int, stored: Stored | None) -> str:
    said = f"{missing:,} of {looked_at:,} contexts are not stored any more: they did not fit"
    if stored is None:
        return f"{said}. hub.arena_gib enlarges the arena; hub.store keeps what it evicts."
    if stored.has_store:
        return f"{said} into the store. hub.store.options.capacity_gib enlarges it."
    enough = stored.arena_gib * looked_at / (looked_at - missing) if missing < looked_at else 0.0
    would = f": {enough:.1f} would hold all" if enough else ""
    return (
        f"{said} into the arena of {stored.arena_gib:.1f} GiB. hub.arena_gib enlarges it{would}; hub.store keeps what "
        "it evicts."
    )


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[list[int]]:
    """The signals that came. The first one stops the command cleanly, the second one at once."""
    came: list[int] = []

    def stopped(number: int, frame: object) -> None:
        came.append(number)
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    former = {number: signal.signal(number, stopped) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[], object]]:
    """Shows on standard error how much is done, and the time that is left."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=600) as bar:
            task = bar.add_task("", total=total)
            yield lambda: bar.advance(task)
        return
    begun = said = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, said
        done += 1
        now = time.monotonic()
        if now > said + SAID_EVERY_S:
            said, left = now, (now - begun) * (total - done) / done
            print(f"{what}: {done:,} of {total:,}, {left / 60:.0f} min left", file=sys.stderr, flush=True)

    yield advance


def _say(line: str) -> None:
    print(line, flush=True)
