"""The start-up checks of a tiny model in an engine of this machine, and one request that reuses moved text.

For ``hardware_check``, which starts the engine from a plain checkout: ``engine_of_the_checkout``.
"""

import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.report import Row, missing_row
from harness.engines import Engine, deviation
from harness.engines.tiny_model import make_config, make_tiny_model

ROOT = Path(__file__).parents[1]
ROUNDING = 1e-2
"""bfloat16 computed in another order, as the norm of the difference; with one wrong position it is above 0.1."""
SETTINGS = {"hub": {"arena_gib": 0.25, "metrics": ""}, "policy": {"max_recompute_share": 1.0}, "audit_share": 0.0}
"""Everything that was asked for is blended, whether it pays or not."""
SHAPE = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "torch_dtype": "bfloat16"}
TEXT_TOKENS, GAP_TOKENS = 300, 5
START_ID, BLEND_ID = "engine_start", "engine_blend"
START = "BlendHub: "
"""Begins the lines that an engine logs once it knows what it reuses."""

StartEngine = Callable[[], Any]
"""Makes the context of an engine with BlendHub."""


def rows(needed: str, start: StartEngine) -> list[Row]:
    """``needed`` is the package that serves this machine's accelerator in vLLM."""
    if not find_spec(needed):
        why = f"{needed} is not installed: no engine was started"
        return [missing_row(START_ID, why, "share", 1.0), missing_row(BLEND_ID, why, "norm", ROUNDING, "lower")]
    try:
        with start() as engine:
            return [*rows_of(engine)]
    except Exception as error:  # whatever an engine ends with belongs into the report
        return [_fell_short(START_ID, f"no engine with BlendHub starts, or it ended: {error}")]


def rows_of(engine: Any) -> Iterator[Row]:
    """An engine whose settings let all of a text be reused; its model takes tokens below 1000."""
    random = np.random.default_rng(1)
    first, second, gap, rest = (
        random.integers(10, 990, n).tolist() for n in (TEXT_TOKENS, TEXT_TOKENS, GAP_TOKENS, GAP_TOKENS)
    )
    engine.one([*first, *second])
    yield start_row(START_ID, "start-up checks", engine.log)
    engine.forget()
    prompt = [*second, *gap, *first, *rest]
    expected = engine.full_prefill(prompt)
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    if blended.report.get("moved_tokens") != 2 * TEXT_TOKENS:
        yield _fell_short(BLEND_ID, f"text was not reused where it had moved: {blended.report}")
        return
    error = deviation(blended.kv(len(prompt) - 1), expected)
    what = "KV of moved text, all of it recomputed: its distance from a full prefill's"
    yield Row(BLEND_ID, what, error, "norm", ROUNDING, "lower", error < ROUNDING, None)


def start_row(id: str, what: str, log: str) -> Row:
    """Whether an engine with this log passed its start-up checks, and what it said."""
    said = [line.partition(START)[2] for line in log.splitlines() if START in line]
    passed = any(line.startswith("text is reused anywhere") for line in said)
    words = "; ".join(said) or "nothing was logged about BlendHub"
    return Row(id, f"{what} passed: {words}", float(passed), "share", 1.0, "higher", passed, None)


@contextmanager
def engine_of_the_checkout(
    settings: dict[str, Any] = SETTINGS,
    environment: dict[str, str] | None = None,
    model: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Iterator[Engine]:
    """An engine that finds this checkout's packages, whether they are installed or not.

    The model is one that attention on NPUs takes, too: 16-bit floats, heads of 128 items, blocks of 128 tokens.
    ``model`` are changes to its configuration.
    """
    with tempfile.TemporaryDirectory() as place:
        paths = paths_of_the_checkout(Path(place) / "metadata")
        given = environment or {}
        search = [*filter(None, [given.get("PYTHONPATH")]), *map(str, paths)]
        make = make_config if options.get("load_format") == "dummy" else make_tiny_model
        made = make(Path(place) / "model", **{**SHAPE, **model})
        environment = {**given, "PYTHONPATH": os.pathsep.join(search)}
        with Engine(
            made, settings, environment=environment, **{"dtype": "bfloat16", "block_size": 128, **options}
        ) as engine:
            yield engine


def paths_of_the_checkout(metadata: Path) -> list[Path]:
    """What Python must search for the checkout's packages and for their entry points, which are written to a folder."""
    projects = [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
    for folder in projects:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        name, groups = project["name"], project.get("entry-points", {})
        target = metadata / f"{name.replace('-', '_')}-0.dist-info"
        target.mkdir(parents=True)
        (target / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {project.get('version', '0')}\n"
        )
        lines = [
            f"[{group}]\n" + "".join(f"{key} = {at}\n" for key, at in given.items()) for group, given in groups.items()
        ]
        (target / "entry_points.txt").write_text("\n".join(lines))
    return [metadata, *projects]


def _fell_short(id: str, why: str) -> Row:
    return Row(id, why, None, "", None, "higher", False, None)
