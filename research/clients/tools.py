"""Other people's benchmarks, as commands that ask one server: ``vllm bench serve``, ``lmcache bench`` and GuideLLM."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.load.client import BENCH_SERVE, Load
from harness.engines import Server
from harness.engines.real_model import BUILD

CLIENTS = BUILD / "clients" / "bin" / "python"
"""The interpreter of the clients."""
_VLLM = "vllm bench serve --ignore-eos --num-prompts {prompts} --max-concurrency 4 --dataset-name "
_LMCACHE = "lmcache bench engine --ignore-eos --workload "
COMMANDS = {
    "random": f"{_VLLM}random --random-input-len 512 --random-output-len 16",
    "prefix_repetition": f"{_VLLM}prefix_repetition --prefix-repetition-prefix-len 512"
    " --prefix-repetition-suffix-len 64 --prefix-repetition-num-prefixes 4 --prefix-repetition-output-len 16",
    "chats": f"{_VLLM}timed_trace --dataset-path chats.jsonl --timed-trace-chunk-hash-size 20 --no-self-timed",
    "long-doc-permutator": f"{_LMCACHE}long-doc-permutator --ldp-num-contexts 5 --ldp-context-length 400"
    " --ldp-system-prompt-length 64 --ldp-num-permutations {rounds} --ldp-max-output-length 16",
    "multi-round-chat": f"{_LMCACHE}multi-round-chat --kv-cache-volume 0.2 --mrc-shared-prompt-length 300"
    " --mrc-chat-history-length 900 --mrc-user-input-length 30 --mrc-output-length 16 --mrc-qps 0.5"
    " --mrc-duration {seconds}",
    "long-doc-qa": f"{_LMCACHE}long-doc-qa --kv-cache-volume 0.3 --ldqa-document-length 1500"
    " --ldqa-query-per-document 3 --ldqa-num-inflight-requests 2 --ldqa-max-output-length 16",
    "sweep": "guidellm run --profile kind=sweep,sweep_size=4 --constraint kind=max_requests,count={prompts}"
    " --data kind=synthetic_text,prompt_tokens=256,output_tokens=16",
}
"""What is run, as a person types it; to each is added which server it asks, and where its result goes."""
SIZES, QUICK = {"prompts": 40, "rounds": 16, "seconds": 20}, {"prompts": 8, "rounds": 3, "seconds": 5}
# vLLM's client hashes the numbers of a trace's pieces. GuideLLM starts its processes anew for each step.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "WARNING", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
TOKENS_PER_GB = 23_296
"""The tokens of SmolLM2 whose KV in float32 takes a gigabyte."""


class Figures(NamedTuple):
    """Medians of requests, and the rate of all."""

    failed: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    """The tokens of answers that the server generates in a second."""


class Program(NamedTuple):
    start: list[str]
    where: Callable[[Server, Path], dict[str, object]]
    """Further options, given the server and a folder for results."""
    result: str
    """The file in that folder."""
    read: Callable[[Any], Figures]


def _of_guidellm(report: Any) -> Figures:
    """The figures of the step that sends as much as it can, and the failures of all steps."""
    steps = report["benchmarks"]
    most = next(step["metrics"] for step in steps if step["config"]["strategy"]["type_"] == "throughput")
    return Figures(
        sum(step["metrics"]["request_totals"]["errored"] for step in steps),
        most["time_to_first_token_ms"]["successful"]["median"],
        most["inter_token_latency_ms"]["successful"]["median"],
        most["output_tokens_per_second"]["successful"]["mean"],
    )


PROGRAMS = {
    "vllm bench serve": Program(
        [sys.executable, "-c", BENCH_SERVE, "--disable-tqdm", "--save-result"],
        lambda server, folder: {
            "base-url": server.url,
            "model": server.name,
            "temperature": 0,
            "ready-check-timeout-sec": 0,
            "result-dir": folder,
            "result-filename": "result.json",
        },
        "result.json",
        lambda result: Figures(
            result["failed"], result["median_ttft_ms"], result["median_tpot_ms"], result["output_throughput"]
        ),
    ),
    "lmcache bench engine": Program(
        [str(CLIENTS), "-m", "lmcache.cli.main", "bench", "engine", "--no-interactive", "-q", "--json"],
        lambda server, folder: {
            "engine-url": server.url,
            "model": server.name,
            "tokens-per-gb-kvcache": TOKENS_PER_GB,
            "output-dir": folder,
        },
        "bench_summary.json",
        lambda summary: Figures(
            summary["results"]["failed_requests"],
            summary["results"]["p50_ttft_ms"],
            1000 / summary["results"]["p50_decode_speed"],
            summary["results"]["output_throughput"],
        ),
    ),
    "guidellm run": Program(
        [str(CLIENTS), "-m", "guidellm", "run", "--disable-console"],
        lambda server, folder: {
            "backend": f"kind=openai_http,target={server.url},model={server.name}",
            "output": f"kind=json,path={folder}/result.json",
        },
        "result.json",
        _of_guidellm,
    ),
}


def measure(command: str, server: Server, folder: Path) -> Figures:
    """Run a command against the server; ``folder``: for its files, made here."""
    program = next(name for name in PROGRAMS if command.startswith(name))
    start, where, result, read = PROGRAMS[program]
    folder.mkdir(parents=True)
    chats = [[*range(100 * chat, 100 * chat + 10 * turn)] for turn in range(1, 6) for chat in range(8)]
    Load(chats, answer_tokens=16).write(folder / "chats.jsonl")
    options = [part for name, value in where(server, folder).items() for part in (f"--{name}", str(value))]
    arguments = command.removeprefix(program).split()
    done = subprocess.run(
        [*start, *arguments, *options],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if not (folder / result).exists():
        raise SystemExit(f"`{command}` failed:\n{done.stdout[-5000:]}")
    return read(json.loads((folder / result).read_text()))
