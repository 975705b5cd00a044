"""The tokens that a request brings."""

from collections.abc import Sequence

from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.hub.limits import MAX_PROMPT_TOKENS


def read_tokens(payload: Sequence[Buffer]) -> Tokens:
    if len(payload) != 1:
        raise InvalidInput(f"tokens come as one payload of uint32, but this request has {len(payload)} payloads")
    tokens = as_tokens(memoryview(payload[0]))
    if len(tokens) > MAX_PROMPT_TOKENS:
        raise InvalidInput(f"{len(tokens)} tokens are more than the {MAX_PROMPT_TOKENS} that a hub accepts")
    return tokens
