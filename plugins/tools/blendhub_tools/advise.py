"""``blendhub advise``: what reuse costs a person's own model and prompts, and which selector and ratio hold."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blendhub.cli.json_input import read_object
from blendhub.contracts import Command
from blendhub.core.errors import OptionError
from blendhub.framework.host import PluginHost
from blendhub.outcome.agreement import audits_needed
from blendhub.system.served_vllm import transfer_config
from blendhub.vllm.settings import KEY, MOST_AUDIT_TOKENS, OWNER, check_settings
from blendhub.vllm.transfer_config import FLAG
from blendhub_tools.advice.answering import Job, Served
from blendhub_tools.advice.card import NO_CURVE, Measurement, check_place, write_card
from blendhub_tools.advice.choice import Advice, advise, agreed, agreement, settings_for
from blendhub_tools.advice.figures import Measured, cells, head, line
from blendhub_tools.advice.judge import ANSWER_TOKENS
from blendhub_tools.advice.measure import distinct_ratios, measured_with, run_engine
from blendhub_tools.advice.outcomes import Outcome
from blendhub_tools.advice.questions import SHAPES, read_questions

if TYPE_CHECKING:
    from rich.progress import Progress

RATIOS = "0,0.05,0.15,0.3,0.5"


class Advise(Command):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = (
            "Answer your prompts with your model in vLLM, in full and with every selector and ratio. Write a model "
            "card with the figures and the curve, and print the configuration that recomputes least among those whose "
            "answers agree with full prefill often enough, with 95% confidence. Exits with 1 if none does, or if the "
            "prompts are too few to tell."
        )
        parser.epilog = f"Shapes of --data, as a JSON list or a line each:\n{SHAPES}"
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        add = parser.add_argument
        add("--model", required=True, help="as `vllm serve` takes it: a name or a path")
        add("--data", required=True, type=Path, metavar="FILE", help="questions; shapes are below")
        add("--agreement", type=float, default=0.9, metavar="SHARE", help="to hold (default 0.9)")
        add("--tokens", type=int, default=ANSWER_TOKENS, metavar="N", help=f"of an answer (default {ANSWER_TOKENS})")
        add(
            "--card", type=Path, default=Path("model-card.md"), metavar="FILE", help="default model-card.md, and a .png"
        )
        add("--selectors", metavar="NAMES", help="with commas between; default: all that are installed")
        add("--ratios", default=RATIOS, metavar="LIST", help=f"default {RATIOS}")
        add("--most", type=int, default=200, metavar="N", help="prompts to read (default 200)")
        add("--engine", default="{}", metavar="JSON", help="arguments of vLLM's LLM, such as max_model_len")
        add("--settings", default="{}", metavar="JSON", help=f"settings to measure with, as in {OWNER}")

    def run(self, arguments: argparse.Namespace) -> int:
        host = PluginHost.discover()
        target, ratios, tokens = arguments.agreement, _ratios(arguments.ratios), arguments.tokens
        if not 0 < target < 1:
            raise OptionError(f"--agreement {target} should be above 0 and below 1, such as 0.95")
        if arguments.most < 1:
            raise OptionError(f"--most {arguments.most} should be at least 1")
        if not 1 <= tokens <= MOST_AUDIT_TOKENS:
            raise OptionError(f"--tokens {tokens} should be from 1 to {MOST_AUDIT_TOKENS}")
        engine, settings = read_object("--engine", arguments.engine), read_object("--settings", arguments.settings)
        check_settings({KEY: settings}, host, None)
        check_place(arguments.card)
        names = arguments.selectors.split(",") if arguments.selectors else host.names("selector")
        served = {name: measured_with(settings, name) for name in names}
        distinct = _without_twins({name: distinct_ratios(host, served[name], ratios) for name in names})
        questions = read_questions(arguments.data, arguments.most)
        print(f"{len(questions)} prompts, each answered in full, and with " + _listed(distinct))
        if len(questions) < (needed := audits_needed(1, target) or 0):
            print(f"These are too few to be sure of {target:.0%}, even if all agree: give at least {needed}.")
        jobs = [
            Job(arguments.model, engine, served[name], name, distinct[name], questions, tokens)
            for name in names
            if distinct[name]
        ]
        how, measured = _measured(jobs)
        advice = advise([one.ours for one in measured], target)
        said = sentence(advice, [one.ours for one in measured], target, tokens, how.unmoved)
        flag = f"--{FLAG} '{json.dumps(transfer_config(settings_for(advice, target, tokens, settings)))}'"
        print(f"\n{said}\n\n{flag}\n")
        made = Measurement(
            model=arguments.model,
            data=arguments.data,
            has_answers=bool(questions[0].answers),
            tokens=tokens,
            served=how,
            measured=measured,
        )
        has_curve = write_card(arguments.card, made, f"{said}\n\n```sh\n{flag}\n```")
        print(f"The model card is {arguments.card}." + ("" if has_curve else f" {NO_CURVE}"))
        return 0 if advice.chosen else 1


def _measured(jobs: Sequence[Job]) -> tuple[Served, list[Measured]]:
    """Run an engine for each selector, print a row for each ratio when all prompts were asked."""
    columns = head(jobs[0].tokens)
    print(line(list(columns), list(columns.values())), flush=True)
    how: Served | None = None
    measured: list[Measured] = []
    with _progress() as progress:
        task = progress.add_task("", total=sum((1 + len(job.ratios)) * len(job.questions) for job in jobs))
        for job in jobs:
            progress.update(task, description=f"{job.selector}: starting vLLM")
            full: Outcome | None = None
            for said in run_engine(job):
                if isinstance(said, Served):
                    if not (how or said.has_template):
                        progress.console.print(
                            f"The tokenizer of {job.model} has no chat template: prompts have none.", soft_wrap=True
                        )
                    how = said
                    continue
                progress.update(task, description=job.selector, advance=said.prompts)
                if said.outcome and full:
                    measured.append(Measured(said.outcome, full))
                    row = line(cells(measured[-1], None), list(columns.values()))
                    progress.console.print(row, highlight=False, soft_wrap=True)
                full = full or said.outcome
    assert how  # an engine that does not come up raises
    return how, measured


def _progress() -> "Progress":
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # Each selector starts an engine, so the time left is estimated from more than the last minute.
    return Progress(*columns, transient=True, speed_estimate_period=600)


def _listed(distinct: dict[str, tuple[float, ...]]) -> str:
    return ", ".join(f"{name} at {' '.join(f'{ratio:g}' for ratio in ratios)}" for name, ratios in distinct.items())


def _ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = tuple(sorted({float(one) for one in text.split(",")}))
    except ValueError:
        ratios = ()
    if not ratios or not all(0 <= ratio <= 1 for ratio in ratios):
        raise OptionError(f"--ratios {text!r} should be numbers from 0 to 1 with commas between, such as 0.1,0.2")
    return ratios


def _without_twins(distinct: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """At a ratio of 0 no selector picks anything: one measures it."""
    first, *others = distinct
    return {first: distinct[first]} | {name: tuple(filter(None, distinct[name])) for name in others}


def sentence(advice: Advice, measured: Sequence[Outcome], target: float, tokens: int, unmoved: str) -> str:
    if not any(agreed(one)[1] for one in measured):
        why = unmoved or "only exact reuse was seen, which loses nothing"
        return f"No text of these prompts was moved: {why}."
    if advice.chosen:
        return f"{_agreed(advice.chosen, tokens)}, and with 95% confidence in more than {target:.0%} of such prompts."
    if advice.promising:
        needed = audits_needed(agreement(advice.promising), target)
        return (
            f"{_agreed(advice.promising, tokens)}. That is too few to be sure of {target:.0%}: if as many of the "
            f"others agree, {needed:,} prompts show it (--data, --most). Until then, exact reuse is safe:"
        )
    return (
        f"Nothing that was measured holds {target:.0%} with {tokens} tokens; exact reuse does, or more of --ratios and "
        "--selectors."
    )


def _agreed(one: Outcome, tokens: int) -> str:
    same, answers = agreed(one)
    all_tokens = f"all {tokens} tokens of the answer" if tokens > 1 else "the first token of the answer"
    return f"{one.selector} with recompute_ratio {one.ratio:g} agreed on {all_tokens} in {same} of {answers} prompts"
