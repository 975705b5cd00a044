"""``blendhub explain``: shows the fate of a prompt's tokens, or what would be reused of the prompt now."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from blendhub.cli.json_input import read_object
from blendhub.cli.strip_view import show_outcome
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import Previewed
from blendhub.core.errors import BlendHubError, OptionError, reason_of
from blendhub.core.layout import Variant
from blendhub.core.spans import Position, Span, gaps, total
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.framework.host import PluginHost
from blendhub.outcome.reasons import NotReused, Why
from blendhub.outcome.report import Outcome, ReusedSpans
from blendhub.system.default_paths import default_endpoint

TIMEOUT_S = 5.0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="show what became of a prompt, or what would be reused of it now",
        description="Show which tokens of a request's prompt were reused, recomputed and computed, and where the "
        "reused ones came from. With --prompt-file or --token-ids, show what would be reused of it now.",
    )
    add = parser.add_argument
    add("request", metavar="REQUEST|-", nargs="?", help="a request's id; or - for a response's JSON on standard input")
    add("--prompt-file", metavar="FILE", help="a prompt's text")
    add("--tokenizer", metavar="NAME", help="its tokenizer: a directory or name; default: the engine's")
    add("--token-ids", metavar="FILE", help="a prompt's token ids: JSON, or numbers and spaces")
    add("--engine", metavar="ID", default="", help="the engine that would serve it, if there are several")
    add("--cache-salt", metavar="SALT", default="", help="the salt of the prompt's request")
    add("--lora", metavar="WEIGHTS", default="", help="of the request's LoRA adapter, as the engine's log names them")
    add("--endpoint", metavar="EP", help="the hub's; default: where `blendhub serve` listens")
    add("--options", metavar="JSON", default="{}", help="the transport's options")
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    sources = (arguments.request, arguments.prompt_file, arguments.token_ids)
    if sum(source is not None for source in sources) != 1:
        raise OptionError("name one: a request's id, - for a response on standard input, --prompt-file or --token-ids")
    title, outcome = _preview(arguments) if arguments.request is None else _of_request(arguments)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(outcome)).decode())
    else:
        show_outcome(title, outcome)
    return 0


def _client(arguments: argparse.Namespace) -> HubClient:
    options = read_object("--options", arguments.options)
    endpoint = arguments.endpoint or default_endpoint()
    return HubClient(endpoint, options=options, host=PluginHost.discover(), timeout=TIMEOUT_S)


def _of_request(arguments: argparse.Namespace) -> tuple[str, Outcome]:
    request = arguments.request
    if request == "-":
        outcome, has_positions = outcome_in_body(sys.stdin.read())
        if has_positions:
            return f"{outcome.request}: {outcome.prompt_tokens:,} tokens", outcome
        request = outcome.request
    with _client(arguments) as client:
        answer = client.explain(request).result()
    if answer.outcome is None:
        raise BlendHubError(
            f"the hub has no report of the request {request!r}: it keeps the last ones of each engine that have ended"
        )
    return f"{answer.outcome.request}: {answer.outcome.prompt_tokens:,} tokens, engine {answer.engine}", answer.outcome


class _Facts(msgspec.Struct):
    engine_tokens: Position
    exact_tokens: Position
    settled_tokens: Position
    moved_tokens: Position
    spans: ReusedSpans | None = None
    reason: str | None = None


def outcome_in_body(text: str) -> tuple[Outcome, bool]:
    """The outcome, and whether the response says which tokens were reused, and not only how many."""
    try:
        body = msgspec.json.decode(text)
        facts = msgspec.convert(body["kv_transfer_params"]["blendhub"], _Facts)
        outcome = Outcome(
            request=body["id"],
            prompt_tokens=body["usage"]["prompt_tokens"],
            engine_tokens=facts.engine_tokens,
            spans=facts.spans or ReusedSpans(),
            reason=facts.reason,
        )
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
        mistake = f"it has no {error}" if isinstance(error, KeyError) else error
        raise OptionError(
            f"standard input is not a response with a report of BlendHub: {mistake}; pipe in the whole body of a "
            "response that is not streamed"
        ) from None
    return outcome, bool(facts.spans) or not (facts.exact_tokens or facts.settled_tokens or facts.moved_tokens)


def _preview(arguments: argparse.Namespace) -> tuple[str, Outcome]:
    variant = Variant(arguments.lora, arguments.cache_salt)
    with _client(arguments) as client:
        if arguments.token_ids is not None:
            tokens = _token_ids(arguments.token_ids)
        else:
            model = (
                arguments.tokenizer or client.preview(np.empty(0, np.uint32), arguments.engine, variant).result().model
            )
            tokens = _tokenized(arguments.prompt_file, model)
        previewed = client.preview(tokens, arguments.engine, variant).result()
    return f"{len(tokens):,} tokens, if engine {previewed.engine} got them now", _outcome_of(previewed, len(tokens))


def _outcome_of(previewed: Previewed, n_tokens: int) -> Outcome:
    """The outcome of a request that uses all matches; an engine's settings may leave out short or few stretches."""
    matches = previewed.matches
    spans = [match.span for match in matches]
    reason = None if spans else "nothing of it is stored"
    if previewed.on_the_way:
        reason = f"{total(previewed.on_the_way):,} more tokens are in the store, and would be fetched"
    unused = [NotReused(Span(0, n_tokens), Why.NOTHING_STORED)]
    return Outcome(
        request="",
        prompt_tokens=n_tokens,
        engine_tokens=0,
        spans=ReusedSpans(
            exact=tuple(match.span for match in matches if match.exact),
            settled=tuple(match.span for match in matches if match.settled),
            moved=tuple(match.span for match in matches if match.moved),
            holes=tuple(gaps(Span(0, spans[-1].end if spans else 0), spans)),
        ),
        sources=matches,
        unused=(*unused, *previewed.staying, *(NotReused(span, Why.ON_THE_WAY) for span in previewed.on_the_way)),
        reason=reason,
    )


def _token_ids(file: str) -> Tokens:
    text = _text(file)
    try:
        ids = msgspec.json.decode(text) if text.lstrip().startswith(("[", "{")) else text.replace(",", " ").split()
        if isinstance(ids, dict):
            ids = ids["prompt_token_ids"]
        return as_tokens(np.asarray([int(id) for id in ids], np.uint32))
    except (ValueError, TypeError, KeyError, OverflowError, msgspec.MsgspecError) as error:
        raise OptionError(
            f"--token-ids {file} holds no token ids: {error}; give a JSON list, or numbers with spaces between them"
        ) from None


def _tokenized(file: str, tokenizer: str) -> Tokens:
    text = _text(file)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise OptionError(
            "--prompt-file needs transformers, which comes with vLLM: pip install transformers; or give --token-ids"
        ) from None
    try:
        ids = AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"]
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise OptionError(f"the tokenizer {tokenizer!r} cannot be loaded: {first}; name it with --tokenizer") from None
    return as_tokens(np.asarray(ids, np.uint32))


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {file}: {reason_of(error)}") from None
