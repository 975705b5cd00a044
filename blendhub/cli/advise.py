"""``blendhub advise``: which selector and which ratio hold an agreement on a person's own prompts."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendhub.cli.json_input import read_object
from blendhub.core.errors import OptionError
from blendhub.framework.host import PluginHost
from blendhub.outcome.agreement import audits_needed
from blendhub.tools.advice.choice import Advice, Measured, PromptAudit, advise, settings_for
from blendhub.tools.advice.measure import Job, distinct_ratios, measured_with, run_engine
from blendhub.tools.advice.questions import SHAPES, read_questions
from blendhub.vllm.settings import KEY, OWNER, mistakes_in_settings
from blendhub.vllm.transfer_config import FLAG

if TYPE_CHECKING:
    from rich.progress import Progress

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
HEADER = f"{'selector':<12} {'ratio':>5} {'audits':>6} {'agree':>6}  {'95% interval':<15} {'median KL':>9}"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        help="find the selector and the ratio that hold an agreement on your prompts",
        description="Serve your prompts with your model in vLLM, audit each of them with every selector and ratio, and "
        "print the configuration that recomputes least among those whose first tokens agree with full prefill often "
        "enough, with 95% confidence. Exits with 1 if none does, or if the prompts are too few to tell.",
        epilog=f"Shapes of --data, as a JSON list or a line each:\n{SHAPES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="as `vllm serve` takes it: a name or a path")
    parser.add_argument("--data", required=True, type=Path, metavar="FILE", help="questions; shapes are below")
    parser.add_argument("--agreement", type=float, default=0.95, metavar="SHARE", help="to hold (default 0.95)")
    parser.add_argument("--selectors", metavar="NAMES", help="with commas between; default: all that are installed")
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)), help=f"default {','.join(map(str, RATIOS))}")
    parser.add_argument("--most", type=int, default=200, metavar="N", help="prompts to read (default 200)")
    parser.add_argument("--engine", default="{}", metavar="JSON", help="arguments of vLLM's LLM, such as max_model_len")
    parser.add_argument("--settings", default="{}", metavar="JSON", help=f"settings to measure with, as in {OWNER}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    host = PluginHost.discover()
    target, ratios = arguments.agreement, _ratios(arguments.ratios)
    if not 0 < target < 1:
        raise OptionError(f"--agreement {target} should be above 0 and below 1, such as 0.95")
    if arguments.most < 1:
        raise OptionError(f"--most {arguments.most} should be at least 1")
    engine, settings = read_object("--engine", arguments.engine), read_object("--settings", arguments.settings)
    if mistakes := mistakes_in_settings({KEY: settings}, host, None):
        raise OptionError("; also: ".join(f"--settings: {mistake}" for mistake in mistakes))
    names = arguments.selectors.split(",") if arguments.selectors else host.names("selector")
    served = {name: measured_with(settings, name) for name in names}
    distinct = {name: distinct_ratios(host, served[name], ratios) for name in names}
    questions = read_questions(arguments.data, arguments.most)
    print(f"{len(questions)} prompts, each audited with " + _listed(distinct))
    if len(questions) < (needed := audits_needed(1, target) or 0):
        print(f"These are too few to be sure of {target:.0%}, even if all agree: give at least {needed}.")
    jobs = [Job(arguments.model, engine, served[name], name, distinct[name], questions) for name in names]
    print(HEADER, flush=True)
    measured = _measured(jobs)
    advice = advise(measured, target)
    print(f"\n{sentence(advice, measured, target)}")
    print(f"\n{_flag(settings_for(advice, target, settings))}")
    return 0 if advice.chosen else 1


def _measured(jobs: Sequence[Job]) -> list[Measured]:
    """Run an engine for each selector, print a row for each ratio when all prompts were audited."""
    measured = []
    with _progress() as progress:
        n_audits = sum(len(job.ratios) * len(job.questions) for job in jobs)
        task = progress.add_task("", total=n_audits)
        for job in jobs:
            progress.update(task, description=f"{job.selector}: starting vLLM")
            audits: list[PromptAudit] = []
            asked = 0
            for part in run_engine(job):
                audits += part.audits
                asked += part.prompts
                progress.update(task, description=f"{job.selector} at {part.ratio:g}", advance=part.prompts)
                if asked == len(job.questions):
                    measured.append(Measured(job.selector, part.ratio, tuple(audits)))
                    progress.console.print(_row(measured[-1]), highlight=False)
                    audits, asked = [], 0
    return measured


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


def _row(one: Measured) -> str:
    low, high = one.interval
    interval = f"{low:.1%} to {high:.1%}"
    return (
        f"{one.selector:<12} {one.ratio:>5g} {len(one.audits):>6} {one.agreement:>6.1%}  {interval:<15} "
        f"{one.divergence:>9.4f}"
    )


def sentence(advice: Advice, measured: Sequence[Measured], target: float) -> str:
    if not any(one.audits for one in measured):
        return "No text of these prompts was moved: only exact reuse was seen, which needs no audit."
    if advice.chosen:
        return (
            f"{_agreed(advice.chosen)}, and with 95% confidence in more than {target:.0%} of such prompts; "
            f"agreement is that of the first token."
        )
    if advice.promising:
        return (
            f"{_agreed(advice.promising)}. That is too few to be sure of {target:.0%}: if as many of the others agree, "
            f"{audits_needed(advice.promising.agreement, target):,} audits show it (--data, --most). Until then, exact "
            "reuse is safe:"
        )
    return f"Nothing that was measured holds {target:.0%}; exact reuse does, or more of --ratios and --selectors."


def _agreed(one: Measured) -> str:
    return f"{one.selector} with recompute_ratio {one.ratio:g} agreed in {one.agreed} of {len(one.audits)} audits"


def _flag(settings: dict[str, Any]) -> str:
    config = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}
    extra = {"kv_connector_extra_config": {KEY: settings}}
    return f"--{FLAG} '{json.dumps(config | extra)}'"
