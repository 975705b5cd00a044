"""An observer in one file: a line of JSON for each request, in the file that BLENDHUB_REPORTS names."""

import os

import msgspec

from blendhub import hookimpl
from blendhub.framework.hookspecs import Outcome

FILE = os.environ.get("BLENDHUB_REPORTS", "blendhub-reports.jsonl")


@hookimpl
def blendhub_request_done(outcome: Outcome) -> None:
    with open(FILE, "ab") as lines:
        lines.write(msgspec.json.encode(outcome) + b"\n")
