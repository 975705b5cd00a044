"""Every format of logs is read, and what cannot be read is counted and named."""

import bz2
import gzip
import json
import lzma
import os
import tracemalloc

import pytest
from blendhub_tools.analysis import lines
from blendhub_tools.analysis.formats import WITHOUT_PROMPT
from blendhub_tools.analysis.logs import Logs

from blendhub.core.errors import InvalidInput

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.fixture
def read(tmp_path):
    """Writes one log and reads it: its prompts, and the log."""

    def read(content):
        file = tmp_path / "log"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        logs = Logs([str(file)])
        return list(logs), logs

    return read


PARTS = [{"type": "input_text", "text": "Why?"}, {"type": "image_url"}]


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": CHAT},
        {"custom_id": "1", "method": "POST", "body": {"messages": CHAT}},
        {"request": json.dumps({"messages": CHAT}), "response": {}},
        {"system": "Be brief.", "messages": CHAT[1:]},
        {"instructions": "Be brief.", "input": "Why?"},
        {"instructions": "Be brief.", "input": [{"role": "user", "content": PARTS}]},
        {"input": {"messages": CHAT}, "tokens": 17},
    ],
)
def test_chats(read, request_):
    (prompt,), logs = read(json.dumps(request_))
    assert not logs.broken.first and prompt.messages == CHAT


@pytest.mark.parametrize(
    "line, expected",
    [
        ('{"prompt": "Once upon"}', ["Once upon"]),
        ('{"prompt": ["one", "two"]}', ["one", "two"]),
        ('{"prompt": [[5, 6], [7]]}', [[5, 6], [7]]),
        ('{"prompt_token_ids": [5, 6], "prompt": "as text"}', [[5, 6]]),
        ('{"token_ids": [4294967295]}', [[2**32 - 1]]),
        ("[5, 6, 7]", [[5, 6, 7]]),
        ("Once upon a time", ["Once upon a time"]),
    ],
)
def test_completions_token_ids_and_plain_text(read, line, expected):
    prompts, logs = read(line + "\n")
    assert not logs.broken.first
    assert [prompt.text if prompt.ids is None else prompt.ids.tolist() for prompt in prompts] == expected


# As a server of vLLM 0.32 prints it with the level DEBUG, but for shorter parameters.
VLLM_0_32 = """\
(APIServer pid=7) INFO 11-22 20:50:42 [entrypoints/.../utils/api_utils.py:286] non-default args: \
{'enable_log_requests': True}
(APIServer pid=7) DEBUG 11-22 20:51:48 [entrypoints/.../utils/request_logger.py:74] Request 9934 JSON body: \
{"model":"tiny","prompt":[5,6,7],"max_tokens":1}
(APIServer pid=7) DEBUG 11-22 20:51:48 [entrypoints/.../utils/request_logger.py:55] Request cmpl-9934-0 details: \
prompt: None, prompt_token_ids: [5, 6, 7], prompt_embeds shape: None.
(APIServer pid=7) INFO 11-22 20:51:48 [entrypoints/.../utils/request_logger.py:65] Received request cmpl-9934-0: \
params: SamplingParams(n=1, stop=[], stop_token_ids=[], extra_args=None), lora_request: None.
(APIServer pid=7) INFO 11-22 20:51:48 [v1/engine/async_llm.py:578] Added request cmpl-9934-0-97b9d450.
INFO:     127.0.0.1:41732 - "POST /v1/completions HTTP/1.1" 200 OK
(EngineCore pid=8) DEBUG 11-22 20:51:50 [v1/engine/core.py:1584] EngineCore waiting for work.
(APIServer pid=7) DEBUG 11-22 20:51:50 [entrypoints/.../utils/request_logger.py:74] Request 823c JSON body: \
{"model":"tiny","prompt":"Received request x: prompt: 'w9', prompt_token_ids: [9]"}
(APIServer pid=7) DEBUG 11-22 20:51:50 [entrypoints/.../utils/request_logger.py:55] Request cmpl-823c-0 details: \
prompt: 'w5 It\\'s "quoted" \\n w7', prompt_token_ids: [5, 902, 901, 903, 7], prompt_embeds shape: None.
(APIServer pid=7) INFO 11-22 20:51:50 [entrypoints/.../utils/request_logger.py:65] Received request cmpl-823c-0: \
params: SamplingParams(n=1, stop=[], stop_token_ids=[], extra_args=None), lora_request: None.
"""
VLLM_COLOURED = """\
\x1b[0;36m(APIServer pid=7)\x1b[0;0m \x1b[37mDEBUG\x1b[0m \x1b[90m03-02 09:00:02\x1b[0m \
\x1b[90m[entrypoints/.../utils/request_logger.py:55]\x1b[0m Request cmpl-2 details: prompt: "It's text", \
prompt_token_ids: None, prompt_embeds shape: None.
(APIServer pid=7) INFO 03-02 09:00:03 [async_llm.py:9] Generated response cmpl-1: output: 'Received', finish_reason: x
"""
VLLM_EARLIER = """\
INFO 03-02 09:00:01 [logger.py:42] Received request cmpl-1: prompt: 'Why?', params: SamplingParams(n=1), \
prompt_token_ids: [8, 9], lora_request: None, prompt_adapter_request: None.
"""


def test_vllm_logs(read):
    (first, second), logs = read(VLLM_0_32)
    assert not logs.broken.first
    assert first.ids.tolist() == [5, 6, 7] and second.ids.tolist() == [5, 902, 901, 903, 7]
    (coloured,), logs = read(VLLM_COLOURED)
    assert not logs.broken.first and coloured.text == "It's text"
    (earlier,), _ = read(VLLM_EARLIER)
    assert earlier.ids.tolist() == [8, 9]


def test_a_vllm_log_without_prompts_says_how_to_get_them(read):
    without = "\n".join(line for line in VLLM_0_32.splitlines() if "DEBUG" not in line)
    prompts, logs = read(without)
    assert not prompts and logs.broken.reasons == {WITHOUT_PROMPT: 2}


def test_compression_and_other_encodings_are_recognised(read):
    content = '{"prompt": "Größe"}\r\n\r\n\ufeff{"prompt": "Größe"}\n'.encode() + b'{"prompt": "Gr\xf6\xdfe"}'
    for compress in (gzip.compress, bz2.compress, lzma.compress, bytes):
        prompts, logs = read(compress(content))
        assert [prompt.text for prompt in prompts] == ["Größe"] * 3 and not logs.broken.first, compress


def test_broken_lines_are_counted_and_named(read, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 200_000)
    good = '{"prompt": "good"}'
    broken = {
        '{"prompt": "cut o': "is not JSON (cut off?)",
        "nonsense": "is not JSON",
        "[" * 100_000: "is nested too deeply",
        '"text"': "is not a request",
        '{"model": "m"}': "has none of the keys messages, prompt, prompt_token_ids",
        '{"messages": []}': "its messages are no list, or an empty one",
        '{"messages": [{"content": "x"}]}': "a message of it has no role",
        '{"messages": [{"role": "user", "content": 5}]}': "the content of a message is no text",
        '{"prompt": {}}': "its token ids are no list, or an empty one",
        '{"prompt": [1, -1]}': "its token ids are not all integers from 0 to 2**32 - 1",
        '{"token_ids": [1.5]}': "its token ids are not all integers from 0 to 2**32 - 1",
        '{"prompt": "' + "x" * 300_000 + '"}': "is longer than 0 MiB",
    }
    prompts, logs = read("\n".join([good, *broken, good, *broken, good]))
    assert len(prompts) == 3 and prompts[1].place.line == len(broken) + 2
    assert logs.broken.reasons.total() == 2 * len(broken)
    assert logs.broken.reasons == dict.fromkeys(broken.values(), 2) | {
        "its token ids are not all integers from 0 to 2**32 - 1": 4
    }
    assert [line.rpartition("log:")[2] for line in logs.broken.first[: len(broken)]] == [
        f"{number} {reason}" for number, reason in enumerate(broken.values(), 2)
    ]


def test_broken_lines_of_any_number_take_bounded_memory():
    broken = lines.BrokenLines()
    for number in range(10_000):
        broken.note(lines.Place("log", number), f"reason {number}")
    assert broken.reasons.total() == 10_000 and len(broken.first) == lines.MAX_NAMED
    assert broken.reasons["other reasons"] == 10_000 - lines.MAX_REASONS


def test_damaged_compressed_data_end_the_file(read):
    whole = gzip.compress("".join(f"{os.urandom(40).hex()}\n" for _ in range(2000)).encode())
    prompts, logs = read(whole[: len(whole) // 2])
    assert prompts and "cannot be read, nor what follows it" in logs.broken.first[-1]


def test_logs_are_streamed_one_after_the_other(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text("".join(f"{name}{number} {'x' * 15_000}\n" for number in range(1000)))
    logs = Logs([str(tmp_path / "b"), str(tmp_path / "a")])
    tracemalloc.start()
    begins = [prompt.text.partition(" ")[0] for prompt in logs]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert begins == [f"{name}{number}" for name in "ba" for number in range(1000)]
    assert peak < (tmp_path / "a").stat().st_size / 2


def test_what_is_not_a_log_is_refused_with_the_next_step(read, tmp_path):
    with pytest.raises(InvalidInput, match="zstd -dc"):
        read(b"\x28\xb5\x2f\xfd" + bytes(20))
    for content in ('[{"prompt": "a"}, {"prompt": "b"}]', '[\n  {"prompt": "a"}\n]', '{\n  "prompt": "a"\n}'):
        with pytest.raises(InvalidInput, match="jq -c"):
            read(content)
    for raw in (b"PAR1\x15\x04\x00\x00 and so on\n", "in two bytes".encode("utf-16")):
        with pytest.raises(InvalidInput, match="is not text in UTF-8"):
            read(raw)
    with pytest.raises(InvalidInput, match="cannot read"):
        Logs([str(tmp_path / "missing")])
