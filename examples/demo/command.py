"""The command line of a demo: its arguments, and what it prints."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.quality.serving import PLAIN
from benchmarks.quality.workloads import LONGEST
from blendhub.system.served_vllm import server_command
from examples.demo import report
from examples.demo.experiment import Measured
from examples.demo.workload import Workload
from harness.engines import Engine
from harness.engines.real_model import NoRealModel, make_real_model

NEEDED = ("vllm", "torch", "gguf", "matplotlib")
CONFIG = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}
NEXT = f"""\
Measure your own model: blendhub advise --model MODEL --data FILE
Serve your own model: {server_command(CONFIG)}"""


def run(module: str, description: str, out: Path, measure: Callable[[Workload], list[Measured]]) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="how many there are (default 4)")
    parser.add_argument("--questions", type=int, default=4, metavar="N", help="to each prompt (default 4)")
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=f"default {out}")
    options = parser.parse_args()
    if min(options.prompts, options.questions) < 1:
        parser.error("ask at least one question to at least one prompt")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(f"The demo needs {' and '.join(missing)}, which {sys.executable} does not have: run `make setup`")
    print("make the model", flush=True)
    try:
        model = make_real_model()
    except NoRealModel as error:
        sys.exit(f"The demo cannot begin: {error}")
    # Not at the top: these come with what may be missing.
    from transformers import AutoTokenizer

    from examples.demo import plot

    workload = Workload(AutoTokenizer.from_pretrained(model), options.prompts, options.questions)
    result = report.make_report(measure(workload))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    plot.draw(result.measured, options.out / "plan.png")
    console = Console()
    console.print(report.answers(result))
    console.print(report.as_table(result))
    console.print(f"{report.in_words(result)}\n", highlight=False)
    written = f"{options.out}/plan.png shows what became of each token, {options.out}/report.json has the figures."
    print(f"{written}\n\n{NEXT}")


def start_engine(blendhub: dict[str, Any], arrange: Sequence[str] = ()) -> Engine:
    print("start vLLM", flush=True)
    lengths = {"max_model_len": LONGEST, "max_num_batched_tokens": LONGEST}
    # An audited request would be answered from exact KV.
    return Engine(make_real_model(), blendhub | {"audit_share": 0}, arrange=arrange, **lengths, **PLAIN)
