"""``blendhub conformance``: the suite that ships with BlendHub, run on an installed plugin."""

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import blendhub
from blendhub.cli.json_input import read_object
from blendhub.core.errors import BlendHubError

SUITE_FILE = str(Path(blendhub.__file__).parent / "testing" / "installed.py")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "conformance",
        help="test an installed plugin against the contract of its kind",
        description="Run the conformance suite of a kind on an installed plugin. "
        "Exits with 0 only if tests ran and none failed.",
    )
    parser.add_argument("kind", metavar="KIND", help="the kind of the plugin, such as: matcher")
    parser.add_argument("name", metavar="NAME", help="its name, as `blendhub plugins` lists it")
    parser.add_argument("--options", metavar="JSON", default="{}", help="options to create it with, as a JSON object")
    parser.add_argument("-k", dest="expression", metavar="EXPR", default="", help="only tests that match, as in pytest")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not (find_spec("pytest") and find_spec("hypothesis")):
        raise BlendHubError("the suites need pytest and hypothesis: pip install 'blendhub[testing]'")
    from blendhub.testing.target import VARIABLE, Target

    target = Target(arguments.kind, arguments.name, read_object("--options", arguments.options))
    # Here, and not only inside pytest, so that a wrong name or option is one line and not a failed collection.
    target.suite()
    # The current directory may hold a pytest configuration, which must not change the result.
    with tempfile.TemporaryDirectory() as root:
        alone = ["--rootdir", root, "-c", os.devnull, "-p", "no:cacheprovider", "--import-mode=importlib"]
        report = ["-q", "--tb=short", "-rN", "-p", "blendhub.cli.pytest_summary", "-k", arguments.expression]
        return subprocess.run(
            [sys.executable, "-m", "pytest", SUITE_FILE, *alone, *report],
            env={**os.environ, VARIABLE: target.encode(), "HYPOTHESIS_STORAGE_DIRECTORY": root},
        ).returncode
