"""``blendhub analyze``: how much of a person's own prompts could be reused."""

import argparse
import contextlib
import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from blendhub.contracts import Command
from blendhub.core.errors import InvalidInput, OptionError, reason_of
from blendhub.framework.host import PluginHost

if TYPE_CHECKING:
    from blendhub_tools.analysis.logs import Logs
    from blendhub_tools.analysis.tallies import Costs
    from blendhub_tools.analysis.tokenizing import Encoder

ARENAS_GIB = "4,16,64,256,1024"
FORMATS = ("jsonl", "text", "vllm")
INTERRUPTED = 130
"""The exit code that shells know for Ctrl-C."""


class Analyze(Command):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = (
            "Play the prompts of your logs through the hub's index and its eviction, and say how much of them could "
            "be reused, with how large an arena. Needs neither vLLM nor a GPU."
        )
        add = parser.add_argument
        add("files", nargs="+", metavar="FILE", help="logs, compressed or not; - for standard input")
        add("--format", choices=FORMATS, help="default: recognised for each file by its first lines")
        add("--tokenizer", metavar="NAME", help="the model's: a folder, or a Hugging Face name")
        add("--bytes", action="store_true", help="count each byte of text as a token: no tokenizer is needed")
        add("--chat-template", type=Path, metavar="FILE", help="default: the tokenizer's")
        add("--arena-gib", default=ARENAS_GIB, metavar="LIST", help=f"sizes of the curve (default {ARENAS_GIB})")
        add("--kv-bytes-per-token", type=int, metavar="N", help="default: by the tokenizer's config.json")
        add(
            "--vllm-cache-tokens",
            type=int,
            metavar="N",
            help="of vLLM's own cache; default: the largest arena",
        )
        add("--token-costs", metavar="E,M", help="of exact and moved tokens on your server, relative to a computed one")
        add("--json", action="store_true", help="print what was found for programs")

    def run(self, arguments: argparse.Namespace) -> int:
        _check(arguments)
        # Here, so that other commands start without what only this one needs.
        from blendhub_tools.analysis.analyzer import Analyzer, Seconds, play
        from blendhub_tools.analysis.findings import About, collect
        from blendhub_tools.analysis.logs import Logs
        from blendhub_tools.analysis.replay import CHUNK_TOKENS
        from blendhub_tools.analysis.report import as_text
        from blendhub_tools.analysis.tokenizing import USUAL

        logs = Logs(arguments.files, arguments.format)
        encoder = _encoder(arguments)
        known = arguments.kv_bytes_per_token or encoder.kv_bytes()
        chunk_bytes = CHUNK_TOKENS * (known or USUAL)
        arenas = [max(int(gib * 2**30 / chunk_bytes), 1) for gib in _gib(arguments.arena_gib)]
        cache = arguments.vllm_cache_tokens
        analyzer = Analyzer(PluginHost.discover(), arenas, _costs(arguments.token_costs), cache)
        if sys.stderr.isatty() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # Started by hand below something that ignores Ctrl-C, as a script may.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        seconds = Seconds()
        with _progress(logs) as progress:
            interrupted = play(logs, encoder, analyzer, seconds, progress)
        if not analyzer.total.requests:
            raise InvalidInput(_nothing(logs, interrupted))
        about = About(
            files=[file.name for file in logs.files],
            tokenizer=arguments.tokenizer or ("a token a byte" if arguments.bytes else "token ids"),
            interrupted=interrupted,
            read_share=logs.position / logs.size if logs.size else None,
            kv_bytes=known or USUAL,
            kv_bytes_known=known is not None,
            seconds=seconds,
        )
        findings = collect(analyzer, logs.broken, about)
        as_json = msgspec.json.format(msgspec.json.encode(findings)).decode()
        print(as_json if arguments.json else as_text(findings), flush=True)
        return INTERRUPTED if interrupted else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.bytes and arguments.tokenizer:
        raise OptionError("--bytes and --tokenizer exclude each other; name one of them")
    if arguments.chat_template and not arguments.tokenizer:
        raise OptionError("--chat-template is for a tokenizer: name one with --tokenizer")
    for name in ("kv_bytes_per_token", "vllm_cache_tokens"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise OptionError(f"--{name.replace('_', '-')} {value:g} should be above 0")


def _encoder(arguments: argparse.Namespace) -> "Encoder":
    from blendhub_tools.analysis.tokenizing import ByteEncoder, IdsOnly, Pretrained

    if arguments.bytes:
        return ByteEncoder()
    if not arguments.tokenizer:
        return IdsOnly()
    template = arguments.chat_template
    try:
        return Pretrained(arguments.tokenizer, template.read_text(encoding="utf-8") if template else None)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--chat-template {template}: cannot be read: {reason_of(error)}") from None


def _gib(text: str) -> list[float]:
    try:
        sizes = sorted({float(one) for one in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < math.inf for size in sizes):
        raise OptionError(f"--arena-gib {text!r} should be numbers above 0 with commas between, such as {ARENAS_GIB}")
    return sizes


def _costs(text: str | None) -> "Costs":
    from blendhub_tools.analysis.tallies import MEASURED, Costs

    if text is None:
        return MEASURED
    try:
        exact, moved = map(float, text.split(","))
    except ValueError:
        exact = moved = -1.0
    if not all(0 <= cost < math.inf for cost in (exact, moved)):
        raise OptionError(f"--token-costs {text!r} should be two numbers from 0 with a comma between, such as 0.03,0.3")
    return Costs(exact, moved)


def _nothing(logs: "Logs", interrupted: bool) -> str:
    names = ", ".join(file.name for file in logs.files)
    if interrupted:
        return f"interrupted before the first prompt of {names} was played"
    if not logs.broken:
        return f"{names}: no prompts, expected one a line: JSON of a request or of token ids, or text"
    place, reason = logs.broken.named[0]
    return f"{names}: none of {len(logs.broken):,} lines can be played; the first one, {place}, {reason}"


@contextlib.contextmanager
def _progress(logs: "Logs") -> Iterator[Callable[[], object]]:
    """A bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("analyzing"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=logs.size or None)
        yield lambda: bar.update(task, completed=logs.position)
