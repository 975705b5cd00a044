"""Reads BlendHub's report in the body of a response of vLLM's OpenAI server."""

from typing import Any

import msgspec

from blendhub.core.errors import OptionError
from blendhub.core.spans import Position
from blendhub.outcome.report import Outcome, PromptReport, RequestReport, ReusedSpans


class _Usage(msgspec.Struct):
    prompt_tokens: Position


class _Params(msgspec.Struct):
    blendhub: dict[str, Any]


class _Body(msgspec.Struct):
    id: str
    usage: _Usage
    kv_transfer_params: _Params


def report_in_body(text: str) -> PromptReport:
    """The report; without a strip if the response says how many tokens were reused, but not which."""
    try:
        body = msgspec.json.decode(text, type=_Body)
        facts = {"request": body.id, "prompt_tokens": body.usage.prompt_tokens, **body.kv_transfer_params.blendhub}
        found = msgspec.convert(facts, RequestReport)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise OptionError(
            f"standard input is not a response with a report of BlendHub: {error}; pipe in the whole body of a "
            "response that is not streamed"
        ) from None
    report = Outcome(
        request=found.request,
        prompt_tokens=found.prompt_tokens,
        engine_tokens=found.engine_tokens,
        spans=found.spans or ReusedSpans(),
        reason=found.reason,
    ).note()
    was_reused = found.exact_tokens or found.settled_tokens or found.moved_tokens or found.hole_tokens
    return msgspec.structs.replace(report, strip=()) if was_reused and not found.spans else report
