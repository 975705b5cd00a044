"""Runs a suite's ``episode`` in this process and prints its answers as JSON: ``FILE CLASS``."""

import importlib.util
import json
import operator
import sys


def main(file: str, qualified_name: str) -> None:
    spec = importlib.util.spec_from_file_location("blendhub_conformance_episode", file)
    assert spec and spec.loader, f"{file} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    suite = operator.attrgetter(qualified_name)(module)()
    json.dump(suite.episode(), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
