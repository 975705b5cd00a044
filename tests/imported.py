"""Imports once what tests and engines import, so that Python has compiled it: ``python -m tests.imported``."""

import pytest

from harness.engines import template

if __name__ == "__main__":
    for module in (*template.IMPORTED, *template.ON_A_CPU):
        template.import_if_there(module)
    pytest.main(["--collect-only", "--quiet"])  # the tests themselves report what cannot be collected
