"""``python -m examples.agent``: an agent that clears its old tool results, on vLLM with SmolLM2-135M-Instruct.

It shows how long each turn took, and what became of its prompt.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from examples.agent.loop import Turn, turns
from harness.engines.engine import transfer_config
from harness.engines.real_model import NoRealModel, make_real_model
from harness.engines.server import NAME, Server

BLENDHUB = {"hub": {"arena_gib": 1.0, "metrics": ""}}
FATES = ("engine", "exact", "settled", "moved", "recomputed")


def main() -> None:
    parser = argparse.ArgumentParser("python -m examples.agent", description=__doc__)
    parser.add_argument(
        "--server", metavar="URL", help="a server that runs, such as http://localhost:8000/v1; otherwise one is started"
    )
    parser.add_argument("--model", default=NAME, help="its model's name")
    given = parser.parse_args()
    if given.server:
        show(turns(OpenAI(base_url=given.server, api_key="none"), given.model))
        return
    try:
        model = make_real_model()
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="blendhub-agent-") as place:
        begun = time.perf_counter()
        with (
            Console().status("vLLM starts"),
            Server(model, Path(place) / "log", transfer_config(BLENDHUB), max_model_len=4096) as server,
        ):
            server.wait_until_up()
            print(f"vLLM started in {time.perf_counter() - begun:.0f} s")
            show(turns(OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none"), NAME))


def show(those: Iterator[Turn]) -> None:
    table = Table(
        *("turn", "calls", "prompt", *(fate if fate != "engine" else "vLLM's cache" for fate in FATES), "seconds"),
        caption="Settled tokens that vLLM's cache has count in both columns; recomputed tokens count as moved, too.",
    )
    for number, turn in enumerate(those, 1):
        tokens = [f"{turn.report.get(f'{fate}_tokens', 0):,}" for fate in FATES]
        called = f"{turn.called}, old results cleared" if turn.cleared else turn.called
        table.add_row(str(number), called, f"{turn.prompt_tokens:,}", *tokens, f"{turn.seconds:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
