"""``blendhub analyze``: how much of a person's own prompts could be reused."""

import argparse
import math
import signal
import sys
from pathlib import Path

import msgspec

from blendhub.contracts import Command
from blendhub.core.errors import InvalidInput, OptionError, reason_of
from blendhub.core.layout import MIN_DONOR_CONTEXT
from blendhub.framework.host import PluginHost
from blendhub_tools.analysis.analyzer import Analyzer, play
from blendhub_tools.analysis.findings import USUAL_KV_BYTES, collect
from blendhub_tools.analysis.logs import FORMATS, Logs
from blendhub_tools.analysis.replay import CHUNK_TOKENS
from blendhub_tools.analysis.report import as_text
from blendhub_tools.analysis.tokenizing import Encoder, Pretrained, as_bytes, refuse

ARENAS_GIB = "4,16,64,256,1024"
BYTES_A_TOKEN = 4
"""About so many, of most texts."""
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
        add("--vllm-cache-tokens", type=int, metavar="N", help="of vLLM's own cache; default: the largest arena")
        add("--json", action="store_true", help="print what was found for programs")

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.bytes and arguments.tokenizer:
            raise OptionError("--bytes and --tokenizer exclude each other; name one of them")
        if arguments.chat_template and not arguments.tokenizer:
            raise OptionError("--chat-template is for a tokenizer: name one with --tokenizer")
        for name in ("kv_bytes_per_token", "vllm_cache_tokens"):
            value = getattr(arguments, name)
            if value is not None and value < 1:
                raise OptionError(f"--{name.replace('_', '-')} {value} should be above 0")
        logs = Logs(arguments.files, arguments.format)
        encoder = _encoder(arguments)
        kv_bytes = arguments.kv_bytes_per_token
        if kv_bytes is None and isinstance(encoder, Pretrained):
            kv_bytes = encoder.kv_bytes()
        chunk_bytes = CHUNK_TOKENS * (kv_bytes or USUAL_KV_BYTES)
        arenas = [max(int(gib * 2**30 / chunk_bytes), 1) for gib in _gib(arguments.arena_gib)]
        border = MIN_DONOR_CONTEXT * (BYTES_A_TOKEN if arguments.bytes else 1)
        analyzer = Analyzer(PluginHost.discover(), arenas, arguments.vllm_cache_tokens, border)
        if sys.stderr.isatty() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # Started by hand below something that ignores Ctrl-C, as a script may.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted = play(logs, encoder, analyzer)
        if not analyzer.prompts:
            raise InvalidInput(_why_nothing(logs, interrupted))
        tokenizer = arguments.tokenizer or ("a token a byte" if arguments.bytes else "token ids")
        findings = collect(analyzer, logs.broken, tokenizer, kv_bytes, interrupted=interrupted)
        as_json = msgspec.json.format(msgspec.json.encode(findings)).decode()
        print(as_json if arguments.json else as_text(findings), flush=True)
        return INTERRUPTED if interrupted else 0


def _encoder(arguments: argparse.Namespace) -> Encoder:
    if not arguments.tokenizer:
        return as_bytes if arguments.bytes else refuse
    template = arguments.chat_template
    try:
        return Pretrained(arguments.tokenizer, template.read_text(encoding="utf-8") if template else None)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--chat-template {template}: cannot be read: {reason_of(error)}") from None


def _gib(text: str) -> list[float]:
    try:
        sizes = sorted({float(size) for size in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < math.inf for size in sizes):
        raise OptionError(f"--arena-gib {text!r} should be numbers above 0 with commas between, such as {ARENAS_GIB}")
    return sizes


def _why_nothing(logs: Logs, interrupted: bool) -> str:
    names = ", ".join(file.name for file in logs.files)
    if interrupted:
        return f"interrupted before the first prompt of {names} was played"
    if not logs.broken.first:
        return f"{names}: no prompts, expected one a line: JSON of a request or of token ids, or text"
    number = logs.broken.reasons.total()
    return f"{names}: none of {number:,} lines can be played; the first one, {logs.broken.first[0]}"
