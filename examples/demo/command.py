"""The command line of a demo: its arguments, and what it prints."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.quality.serving import PLAIN
from benchmarks.quality.workloads import LONGEST, QUESTIONS
from blendhub.system.served_vllm import server_command
from examples.demo import report
from examples.demo.questions import ask_all, make_prompts, show_documents
from harness.engines import Engine
from harness.engines.real_model import NoRealModel, make_real_model

NEEDED = ("vllm", "torch", "gguf", "matplotlib")
CONFIG = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}
NEXT = f"""\
Measure your own model: blendhub advise --model MODEL --data FILE
Serve your own model: {server_command(CONFIG)}"""

Engines = tuple[Engine, Engine, Callable[[], None]]
"""The engine that sees the documents first, the one that is asked about them, and what to wait for between."""


def run(module: str, out: Path, start: Callable[[], AbstractContextManager[Engines]]) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Ask questions in three ways.")
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="how many there are (default 4)")
    counts = range(1, QUESTIONS + 1)
    parser.add_argument("--questions", type=int, choices=counts, default=4, help="to each prompt (default 4)")
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=f"default {out}")
    options = parser.parse_args()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(f"The demo needs {' and '.join(missing)}, which {sys.executable} does not have: run `make setup`")
    print("make the model", flush=True)
    try:
        model = make_real_model()
    except NoRealModel as error:
        sys.exit(f"The demo cannot begin: {error}")
    # Not at the top: these come with what may be missing.
    from transformers import AutoTokenizer

    from examples.demo.plot import draw

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = make_prompts(tokenizer, options.prompts, options.questions)
    with start() as (writer, reader, wait_until_shared):
        show_documents(writer, prompts)
        wait_until_shared()
        result = report.make_report(ask_all(reader, prompts, tokenizer))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    draw(result.answers, options.out / "plan.png")
    console = Console()
    console.print(report.answers_table(result))
    console.print(report.figures_table(result))
    console.print(f"{report.in_words(result)}\n", highlight=False)
    written = f"{options.out}/plan.png shows what became of each token, {options.out}/report.json has the figures."
    print(f"{written}\n\n{NEXT}")


def start_engine(blendhub: dict[str, Any], arrange: Sequence[str] = ()) -> Engine:
    print("start vLLM", flush=True)
    lengths = {"max_model_len": LONGEST, "max_num_batched_tokens": LONGEST}
    # An audited request would be answered from exact KV.
    return Engine(make_real_model(), blendhub | {"audit_share": 0}, arrange=arrange, **lengths, **PLAIN)
