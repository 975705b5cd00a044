"""OpenAI's client asks a real model, with BlendHub and without: types, reasons to finish, and texts are the same."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import httpx
import openai
import pytest

from benchmarks.quality.people import people
from harness.waiting import wait_until
from research.clients.servers import Servers

pytestmark = pytest.mark.timeout(1800)

LIVES = [person.text for person in islice(people(random.Random("openai")), 10)]
TEXT = "\n\n".join(LIVES[:4])
MESSAGES = [
    {"role": "system", "content": f"You answer questions about these lives.\n\n{TEXT}"},
    {"role": "user", "content": "Who was born first?"},
]
TOWNS = {"type": "object", "properties": {"town": {"enum": ["Lisbon", "Oslo"]}}, "required": ["town"]}
TOOL = {"type": "function", "function": {"name": "travel", "parameters": TOWNS}}
CHATS: dict[str, dict[str, Any]] = {
    "chat": {},
    "n": {"n": 3, "temperature": 1.0, "seed": 1},
    "seed": {"temperature": 1.0, "seed": 7},
    "stop": {"stop": [" "]},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "tools": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 64},
    "a tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "travel"}}, "max_tokens": 64},
    "structured": {"response_format": {"type": "json_schema", "json_schema": {"name": "travel", "schema": TOWNS}}},
}
"""What chats ask for besides."""
VARYING = {"id", "created", "kv_transfer_params", "prompt_tokens_details", "system_fingerprint"}
"""Fields that differ from response to response, or say what was reused."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with Servers(tmp_path_factory.mktemp("clients")) as servers:
        yield servers


@pytest.fixture(scope="module")
def asked(servers):
    """The clients of vLLM alone and of BlendHub's server."""
    return [openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) for server in servers.both]


def body(mode):
    return {"kv_transfer_params": {"blendhub": {"mode": mode}}} if mode else {}


def shape(answer):
    """An answer's fields, with types in place of what chance and rounding change."""
    if isinstance(answer, dict):
        return {name: shape(value) for name, value in answer.items() if name not in VARYING}
    if isinstance(answer, list):
        return [shape(value) for value in answer]
    return float if isinstance(answer, float) else answer


def ask(client, model, mode=None, **options):
    options = {"max_tokens": 16, "temperature": 0, "extra_body": body(mode)} | options
    return client.chat.completions.create(model=model, messages=MESSAGES, **options)


def forget(servers):
    """Empty vLLM's own cache, so that what is reused comes from BlendHub."""
    httpx.post(f"{servers.ours.url}/reset_prefix_cache").raise_for_status()


@pytest.mark.parametrize("options", CHATS.values(), ids=CHATS)
def test_a_chat_is_the_same_where_it_is_computed_and_where_it_is_brought_back(servers, asked, options):
    plain, ours = asked
    expected = shape(ask(plain, servers.model, **options).model_dump())
    for _ in range(2):
        forget(servers)
        answer = ask(ours, servers.model, "exact", **options)
        assert shape(answer.model_dump()) == expected
    assert answer.usage.prompt_tokens_details.cached_tokens > 256


def test_a_completion_is_the_same(servers, asked):
    options = {"model": servers.model, "prompt": f"{TEXT}\n\nThe oldest of them is", "max_tokens": 16, "temperature": 0}
    plain, ours = asked
    expected = shape(plain.completions.create(**options).model_dump())
    for _ in range(2):
        forget(servers)
        answer = ours.completions.create(**options, extra_body=body("exact"))
        assert shape(answer.model_dump()) == expected


def streamed(client, model, mode=None):
    """The text, the reason to finish, the types of the chunks, and the usage."""
    chunks = [*ask(client, model, mode, stream=True, stream_options={"include_usage": True})]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    return text, choices[-1].finish_reason, set(map(type, chunks)), shape(chunks[-1].usage.model_dump())


def test_a_stream_is_the_same(servers, asked):
    plain, ours = asked
    expected = streamed(plain, servers.model)
    for _ in range(2):
        forget(servers)
        assert streamed(ours, servers.model, "exact") == expected


def test_a_stream_that_is_cancelled_leaves_nothing_behind(servers, asked):
    ours = asked[1]
    before = ask(ours, servers.model).choices[0].message.content
    with ask(ours, servers.model, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))

    def is_idle() -> bool:
        lines = httpx.get(f"{servers.ours.url}/metrics").text.splitlines()
        return all(line.endswith(" 0.0") for line in lines if line.startswith("vllm:num_requests_running"))

    wait_until(is_idle, 30)
    assert ask(ours, servers.model).choices[0].message.content == before


def test_sixteen_at_once_are_answered_as_one_by_one(servers, asked):
    plain, ours = asked
    questions = [f"Where was person {number} born?" for number in range(16)]

    def answer(client, question, mode=None):
        messages = [MESSAGES[0], {"role": "user", "content": question}]
        options = {"max_tokens": 8, "temperature": 0, "extra_body": body(mode)}
        return shape(client.chat.completions.create(model=servers.model, messages=messages, **options).model_dump())

    expected = [answer(plain, question) for question in questions]
    forget(servers)
    with ThreadPoolExecutor(16) as pool:
        assert [*pool.map(lambda question: answer(ours, question, "exact"), questions)] == expected


def test_usage_counts_what_was_brought_back(servers, asked):
    """Text that moves, once it was computed behind other text."""
    ours = asked[1]
    for company in (LIVES[4:6], ["These lives are in no order."]):
        prompt = "\n\n".join([*company, *LIVES[6:], "The oldest of them is"])
        answer = ours.completions.create(model=servers.model, prompt=prompt, max_tokens=1, temperature=0)
    counts = answer.kv_transfer_params["blendhub"]
    assert counts["moved_tokens"] > 256
    kept = sum(counts[f"{fate}_tokens"] for fate in ("engine", "exact", "settled", "moved"))
    assert answer.usage.prompt_tokens_details.cached_tokens == kept - counts["recomputed_tokens"]
