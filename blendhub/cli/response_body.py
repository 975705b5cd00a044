"""Reads BlendHub's report in the body of a response of vLLM's OpenAI server."""

from typing import Any

import msgspec

from blendhub.core.errors import OptionError
from blendhub.framework.hookspecs import ReusedSpans
from blendhub.outcome.report import PromptReport, Tokens, prompt_report


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens


class _Report(msgspec.Struct):
    engine_tokens: Tokens
    exact_tokens: Tokens
    moved_tokens: Tokens
    hole_tokens: Tokens
    settled_tokens: Tokens = 0
    reason: str | None = None
    spans: ReusedSpans | None = None


class _Params(msgspec.Struct):
    blendhub: _Report


class _Body(msgspec.Struct):
    id: str
    usage: _Usage
    kv_transfer_params: _Params


def report_in_body(text: str) -> PromptReport:
    """The report; without a strip if the response says how many tokens were reused, but not which."""
    try:
        body = msgspec.json.decode(text, type=_Body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise OptionError(
            f"standard input is not a response with a report of BlendHub: {error}; pipe in the whole body of a "
            "response that is not streamed"
        ) from None
    found = body.kv_transfer_params.blendhub
    spans: dict[str, Any] = msgspec.structs.asdict(found.spans) if found.spans else {}
    report = prompt_report(body.id, body.usage.prompt_tokens, found.engine_tokens, spans, reason=found.reason)
    was_reused = found.exact_tokens or found.settled_tokens or found.moved_tokens or found.hole_tokens
    return msgspec.structs.replace(report, strip=()) if was_reused and not spans else report
