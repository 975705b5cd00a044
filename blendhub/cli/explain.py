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
from blendhub.core.spans import Position, Span, gaps
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
    parser.add_argument(
        "request", metavar="REQUEST|-", nargs="?", help="a request's id; or - for a response's JSON on standard input"
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="a prompt's text")
    parser.add_argument("--tokenizer", metavar="NAME", help="its tokenizer: a directory or name; default: the engine's")
    parser.add_argument("--token-ids", metavar="FILE", help="a prompt's token ids: JSON, or numbers and spaces")
    parser.add_argument(
        "--engine", metavar="ID", default="", help="the engine that would serve it, if there are several"
    )
    parser.add_argument("--cache-salt", metavar="SALT", default="", help="the salt of the prompt's request")
    parser.add_argument(
        "--lora", metavar="WEIGHTS", default="", help="of the request's LoRA adapter, as the engine's log names them"
    )
    parser.add_argument("--endpoint", metavar="EP", help="the hub's; default: where `blendhub serve` listens")
    parser.add_argument("--options", metavar="JSON", default="{}", help="the transport's options, such as keys")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    given = [arguments.request, arguments.prompt_file, arguments.token_ids]
    if sum(one is not None for one in given) != 1:
        raise OptionError("name one: a request's id, - for a response on standard input, --prompt-file or --token-ids")
    if arguments.request is None:
        title, outcome = _preview(arguments)
    elif arguments.request == "-":
        title, outcome = _from_response(arguments)
    else:
        title, outcome = _of_request(arguments, arguments.request)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(outcome)).decode())
    else:
        show_outcome(title, outcome)
    return 0


def _client(arguments: argparse.Namespace) -> HubClient:
    options = read_object("--options", arguments.options)
    endpoint = arguments.endpoint or default_endpoint()
    return HubClient(endpoint, options=options, host=PluginHost.discover(), timeout=TIMEOUT_S)


def _of_request(arguments: argparse.Namespace, request: str) -> tuple[str, Outcome]:
    with _client(arguments) as client:
        found = client.explain(request)
    outcome = found.outcome
    if outcome is None:
        raise BlendHubError(
            f"the hub has no report of the request {request!r}: it keeps the last ones of each engine that have ended"
        )
    return f"{outcome.request}: {outcome.prompt_tokens:,} tokens, engine {found.engine}", outcome


def _from_response(arguments: argparse.Namespace) -> tuple[str, Outcome]:
    outcome, has_positions = outcome_in_body(sys.stdin.read())
    if has_positions:
        return f"{outcome.request}: {outcome.prompt_tokens:,} tokens", outcome
    return _of_request(arguments, outcome.request)


def _preview(arguments: argparse.Namespace) -> tuple[str, Outcome]:
    variant = Variant(arguments.lora, arguments.cache_salt)
    with _client(arguments) as client:
        if arguments.token_ids is not None:
            tokens = _token_ids(arguments.token_ids)
        else:
            model = arguments.tokenizer or client.preview(np.empty(0, np.uint32), arguments.engine, variant).model
            tokens = _tokenized(arguments.prompt_file, model)
        found = client.preview(tokens, arguments.engine, variant)
    return f"{len(tokens):,} tokens, if engine {found.engine} got them now", _outcome_of(found, len(tokens))


def _outcome_of(found: Previewed, n_tokens: int) -> Outcome:
    """The outcome of a request that uses all matches; an engine's settings may leave out short or few stretches."""
    spans = [match.span for match in found.matches]
    reason = "nothing of it is stored" if not spans else None
    if found.on_the_way_tokens:
        reason = f"{found.on_the_way_tokens:,} more tokens are in the store, and would be fetched"
    reused = ReusedSpans(
        exact=tuple(match.span for match in found.matches if match.exact),
        settled=tuple(match.span for match in found.matches if match.settled),
        moved=tuple(match.span for match in found.matches if match.moved),
        holes=tuple(gaps(Span(0, spans[-1].end if spans else 0), spans)),
    )
    unused = [NotReused(Span(0, n_tokens), Why.NOTHING_STORED)]
    unused += [NotReused(span, Why.ON_THE_WAY) for span in found.on_the_way]
    return Outcome(
        request="",
        prompt_tokens=n_tokens,
        engine_tokens=0,
        spans=reused,
        sources=found.matches,
        unused=tuple(unused),
        reason=reason,
    )


def _token_ids(file: str) -> Tokens:
    text = _text(file)
    try:
        ids = msgspec.json.decode(text) if text.lstrip().startswith(("[", "{")) else text.replace(",", " ").split()
        if isinstance(ids, dict):
            ids = ids["prompt_token_ids"]
        return as_tokens(np.asarray([int(one) for one in ids], np.uint32))
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


class _Usage(msgspec.Struct):
    prompt_tokens: Position


class _Facts(msgspec.Struct):
    engine_tokens: Position
    exact_tokens: Position
    settled_tokens: Position
    moved_tokens: Position
    spans: ReusedSpans | None = None
    reason: str | None = None


class _Params(msgspec.Struct):
    blendhub: _Facts


class _Body(msgspec.Struct):
    id: str
    usage: _Usage
    kv_transfer_params: _Params


def outcome_in_body(text: str) -> tuple[Outcome, bool]:
    """The outcome, and whether the response says which tokens were reused, and not only how many."""
    try:
        body = msgspec.json.decode(text, type=_Body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise OptionError(
            f"standard input is not a response with a report of BlendHub: {error}; pipe in the whole body of a "
            "response that is not streamed"
        ) from None
    facts = body.kv_transfer_params.blendhub
    outcome = Outcome(
        request=body.id,
        prompt_tokens=body.usage.prompt_tokens,
        engine_tokens=facts.engine_tokens,
        spans=facts.spans or ReusedSpans(),
        reason=facts.reason,
    )
    return outcome, bool(facts.spans) or not (facts.exact_tokens or facts.settled_tokens or facts.moved_tokens)
