"""``python -m examples.agent``: an agent that clears its old tool results, on vLLM with SmolLM2-135M-Instruct.

Its conversation is one of BFCL, whose answers are replayed. Shows how long each turn took, and what became of its
prompt; and, of turns that clear results, why less was reused, as where computing is sooner done.
"""

import argparse
from secrets import token_hex

from rich.console import Console
from rich.table import Table

from harness.engines.real_model import NoRealModel, make_real_model
from research.agents.conversations import BLENDHUB, ask, clearing, conversations, serving

FATES = {"engine": "vLLM's cache"} | {fate: fate for fate in ("exact", "settled", "moved", "recomputed")}
CAPTION = "Settled tokens that vLLM's cache has count in both columns; recomputed tokens count as moved, too."


def main() -> None:
    parser = argparse.ArgumentParser("python -m examples.agent", description=__doc__)
    parser.add_argument("--turns", type=int, default=14, metavar="N", help="old results go every fifth (default 14)")
    options = parser.parse_args()
    refused: list[str] = []
    table = Table("turn", "the user says", "prompt", *FATES.values(), "seconds", caption=CAPTION)
    try:
        conversation, salt = next(conversations(options.turns)), token_hex(8)
        print("start vLLM", flush=True)
        with serving(make_real_model(), BLENDHUB) as server:
            for number, step in enumerate(clearing(conversation), 1):
                reply = ask(server, step, salt)
                if step.is_edited and (reason := reply.report.get("reason")):
                    refused.append(f"turn {number}: {reason}")
                said = "old results cleared" if step.is_edited else step.messages[-1]["content"][:30]
                tokens = [reply.prompt_tokens, *(reply.report.get(f"{fate}_tokens", 0) for fate in FATES)]
                table.add_row(str(number), said, *(f"{n:,}" for n in tokens), f"{reply.seconds:.2f}")
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    Console(width=120).print(table)
    print(*refused, sep="\n")


if __name__ == "__main__":
    main()
