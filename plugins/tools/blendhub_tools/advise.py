"""``blendhub advise``: what reuse costs a person's own model and prompts, and which selector and ratio hold."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendhub.cli.json_input import read_object
from blendhub.contracts import Command
from blendhub.core.errors import InvalidInput, OptionError
from blendhub.framework.host import PluginHost
from blendhub.outcome.agreement import audits_needed
from blendhub.system.served_vllm import transfer_config
from blendhub.vllm.settings import KEY, OWNER, Settings, read_settings
from blendhub.vllm.transfer_config import FLAG
from blendhub_tools.advice.answering import Job, Served
from blendhub_tools.advice.card import Measured, card, head
from blendhub_tools.advice.choice import advise, agreed, in_words, selector_of, settings_for
from blendhub_tools.advice.judge import ANSWER_TOKENS
from blendhub_tools.advice.measure import run_engine
from blendhub_tools.advice.outcomes import Outcome
from blendhub_tools.advice.questions import SHAPES, read_questions

if TYPE_CHECKING:
    from rich.progress import Progress

RATIOS = "0,0.05,0.15,0.3,0.5"
MAX_TOKENS = 256
"""The most tokens of an answer that are compared."""


class Advise(Command):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = (
            "Answer your prompts with your model in vLLM, in full and with each selector and ratio. Write a model "
            "card with the figures, and print the configuration that recomputes least among those whose answers agree "
            "with full prefill often enough, with 95% confidence. Exits with 1 if none does, or if the prompts are too "
            "few to tell."
        )
        parser.epilog = f"Shapes of --data, as a JSON list or a line each:\n{SHAPES}"
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        add = parser.add_argument
        add("--model", required=True, help="as `vllm serve` takes it: a name or a path")
        add("--data", required=True, type=Path, metavar="FILE", help="questions; shapes are below")
        add("--agreement", type=float, default=0.9, metavar="SHARE", help="to hold (default 0.9)")
        add("--tokens", type=int, default=ANSWER_TOKENS, metavar="N", help=f"of an answer (default {ANSWER_TOKENS})")
        add("--card", type=Path, default=Path("model-card.md"), metavar="FILE", help="default model-card.md")
        default = Settings().selector.name
        add("--selectors", default=default, metavar="NAMES", help=f"with commas between (default {default})")
        add("--ratios", default=RATIOS, metavar="LIST", help=f"default {RATIOS}")
        add("--most", type=int, default=200, metavar="N", help="prompts to read (default 200)")
        add("--engine", default="{}", metavar="JSON", help="arguments of vLLM's LLM, such as max_model_len")
        add("--settings", default="{}", metavar="JSON", help=f"settings to measure with, as in {OWNER}")

    def run(self, arguments: argparse.Namespace) -> int:
        target, tokens = arguments.agreement, arguments.tokens
        settings = read_object("--settings", arguments.settings)
        jobs = _jobs(arguments, settings)
        questions = jobs[0].questions
        print(f"{len(questions)} prompts, each answered in full, and with {arguments.selectors} at {arguments.ratios}")
        if len(questions) < (needed := audits_needed(1, target) or 0):
            print(f"These are too few to be sure of {target:.0%}, even if all agree: give at least {needed}.")
        served, measured = _measured(jobs)
        outcomes = [comparison.ours for comparison in measured]
        advice = advise(outcomes, target)
        said = in_words(advice, target, tokens)
        if not any(agreed(outcome)[1] for outcome in outcomes):
            why = served.unmoved or "only exact reuse was seen, which loses nothing"
            said = f"No text of these prompts was moved: {why}."
        config = transfer_config(settings_for(advice.chosen, target, settings))
        flag = f"--{FLAG} '{json.dumps(config)}'"
        print(f"\n{said}\n\n{flag}\n")
        page = card(jobs[0], arguments.data, served, measured, f"{said}\n\n```sh\n{flag}\n```")
        arguments.card.write_text("\n".join(page) + "\n", encoding="utf-8")
        print(f"The model card is {arguments.card}.")
        return 0 if advice.chosen else 1


def _jobs(arguments: argparse.Namespace, settings: dict[str, Any]) -> list[Job]:
    """What is measured, one job a selector; raises a BlendHubError if anything of it is not possible."""
    if not 0 < arguments.agreement < 1:
        raise OptionError(f"--agreement {arguments.agreement} should be above 0 and below 1, such as 0.95")
    if arguments.most < 1:
        raise OptionError(f"--most {arguments.most} should be at least 1")
    if not 1 <= arguments.tokens <= MAX_TOKENS:
        raise OptionError(f"--tokens {arguments.tokens} should be from 1 to {MAX_TOKENS}")
    try:
        ratios = tuple(sorted({float(ratio) for ratio in arguments.ratios.split(",")}))
    except ValueError:
        ratios = ()
    if not ratios or not all(0 <= ratio <= 1 for ratio in ratios):
        raise OptionError(
            f"--ratios {arguments.ratios!r} should be numbers from 0 to 1 with commas between, such as 0.1,0.2"
        )
    if not os.access(arguments.card.absolute().parent, os.W_OK) or arguments.card.is_dir():
        # Better before than after the measurement.
        raise InvalidInput(
            f"--card {arguments.card} cannot be written: name a file in a directory that exists and is yours"
        )
    engine, host = read_object("--engine", arguments.engine), PluginHost.discover()
    read_settings({KEY: settings}, host, None, runs_here=False)
    served = {
        name: settings
        | {"audit_share": 0, "repair": "off", "doubt": 0, "mode": "blend", "selector": selector_of(name, settings)}
        for name in arguments.selectors.split(",")
    }
    for measured in served.values():
        read_settings({KEY: measured}, host, None, runs_here=False)
    questions = read_questions(arguments.data, arguments.most)
    return [
        Job(arguments.model, engine, measured, name, ratios, questions, arguments.tokens)
        for name, measured in served.items()
    ]


def _measured(jobs: Sequence[Job]) -> tuple[Served, list[Measured]]:
    """Run an engine for each selector, print a row for each ratio when all prompts were asked."""
    served: Served | None = None
    measured: list[Measured] = []
    with _progress() as progress:
        progress.console.print(head(jobs[0].tokens), highlight=False, soft_wrap=True)
        task = progress.add_task("", total=sum((1 + len(job.ratios)) * len(job.questions) for job in jobs))
        for job in jobs:
            progress.update(task, description=f"{job.selector}: starting vLLM")
            full: Outcome | None = None
            reuse: Outcome | None = None
            for message in run_engine(job):
                if isinstance(message, Served):
                    served = message
                    continue
                progress.update(task, description=job.selector, advance=message.prompts)
                if message.outcome and full:
                    reuse = reuse or (message.outcome if message.outcome.ratio == 0 else None)
                    measured.append(Measured(message.outcome, full, reuse))
                    progress.console.print(measured[-1].row(), highlight=False, soft_wrap=True)
                full = full or message.outcome
    assert served  # an engine that does not come up raises
    return served, measured


def _progress() -> "Progress":
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # Each selector starts an engine, so the time left is estimated from more than the last minute.
    return Progress(*columns, transient=True, speed_estimate_period=600)
