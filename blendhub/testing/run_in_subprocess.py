"""A suite's ``answers`` from another process: run as ``FILE CLASS``, this module prints them as JSON."""

import importlib.util
import inspect
import json
import operator
import os
import subprocess
import sys
from typing import Any


def run_in_subprocess(suite: object, hash_seed: str) -> Any:
    """The suite's answers from a new interpreter, which finds the suite by its file."""
    cls = type(suite)
    done = subprocess.run(
        [sys.executable, "-m", __name__, inspect.getfile(cls), cls.__qualname__],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"the suite cannot be run in another process:\n{done.stderr}"
    return json.loads(done.stdout)


def main(file: str, qualified_name: str) -> None:
    spec = importlib.util.spec_from_file_location("blendhub_conformance_answers", file)
    assert spec and spec.loader, f"{file} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    suite = operator.attrgetter(qualified_name)(module)()
    json.dump(suite.answers(), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
