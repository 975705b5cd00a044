"""The page of docs/ with what was measured."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.clients.tools import Figures
from benchmarks.report import Row

FRAMEWORKS = {"langchain": "LangChain", "llama_index": "LlamaIndex"}
Measured = Sequence[Figures]
"""vLLM alone, with BlendHub, and, where it was asked, with LMCache."""
PAGE = """\
# What other people's benchmarks say

`make test-clients` writes this page: SmolLM2-135M in float32, served by vLLM alone and by vLLM with BlendHub. BlendHub has its
default settings and an arena of 1 GiB. Both servers compute on one core, and are asked in turn: each question of an application,
and each benchmark, first of vLLM alone. Where others use the machine, single times say little.

## Applications

Each is built as its guide says, retrieves four of twelve short biographies for a question, and was asked 12 questions before the
30 that count. An answer is right if it has the right word.

| | right answers, relative to vLLM alone | share of its right answers that stay right | time of a question, relative | share of a prompt that was brought back | errors |
|---|---|---|---|---|---|
{applications}

{counts}

## Benchmarks

vLLM alone, then with BlendHub, and then, in the rows of LMCache's own benchmarks, with LMCache 0.5.6 and its server (`--peer-python`), if
there is a third figure: medians in milliseconds, and tokens of answers a second. Those of the sweep are of its step with the highest
rate; its failures are of all steps.

| | failed | to the first token | per further token | tokens/s |
|---|---|---|---|---|
{benchmarks}

{memory}

The commands; to each is added which server it asks, and where its result goes:

```sh
{commands}
```

Versions: {versions}.
"""  # noqa: E501


def page(rows: Sequence[Row], measured: Mapping[str, Measured], commands: Mapping[str, str]) -> str:
    known = {measurement.id: measurement for measurement in rows}

    def cell(id: str) -> str:
        measurement = known[id]
        spread = " ({:.2f} to {:.2f})".format(*measurement.spread) if measurement.spread else ""
        return "-" if measurement.value is None else f"{measurement.value:.3g}{spread}"

    ids = ("app", "kept", "time", "reused", "raised")
    benchmarks = {
        name: [", ".join(f"{figure:.4g}" for figure in column) for column in zip(*figures, strict=True)]
        for name, figures in measured.items()
    }
    groups = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["dependency-groups"]
    return PAGE.format(
        applications="\n".join(
            f"| {name} | {' | '.join(cell(f'{id}_{framework}') for id in ids)} |"
            for framework, name in FRAMEWORKS.items()
        ),
        counts="\n".join(f"- {known[f'{id}_{framework}'].what}" for framework in FRAMEWORKS for id in ids[:2]),
        benchmarks="\n".join(f"| `{name}` | {' | '.join(cells)} |" for name, cells in benchmarks.items()),
        memory=f"{known['memory_growth'].what}: {cell('memory_growth')}.",
        commands="\n".join(commands.values()),
        versions=", ".join(groups["clients"] + groups["lmcache"]),
    )
