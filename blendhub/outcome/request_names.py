"""The names of a request: vLLM makes its own ids from those that clients know."""

import re

_RANDOM = re.compile(r"-[0-9a-z]{8}$")
"""What vLLM adds to every id."""
_PROMPT = re.compile(r"^(cmpl-.+)-\d+$")
"""A completion may have several prompts; vLLM adds the number of each."""
_ANSWER = re.compile(r"^\d+_")
"""A prompt may have several answers; vLLM puts the number of each before its id."""


def names_of(of_engine: str) -> set[str]:
    """The names by which clients may know a request that the engine knows by this id."""
    whole = _ANSWER.sub("", of_engine)
    short = _RANDOM.sub("", whole)
    return {of_engine, whole, short, _PROMPT.sub(r"\1", short)}
