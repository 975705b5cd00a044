"""A good client in another pid namespace, as in a container with the machine's shared memory."""

import multiprocessing
import threading

from benchmarks.soak.clients import SMALL, Report, work


def main(endpoint: str) -> None:
    """Works until it is terminated; then prints how many tokens were wrong, and its lookups."""
    reports, theirs = multiprocessing.Pipe(duplex=False)
    lookups = wrong = 0

    def collect() -> None:
        nonlocal lookups, wrong
        while True:
            try:
                report: Report = reports.recv()
            except EOFError:
                return
            lookups += report[0]["lookups"]
            wrong += report[0]["WRONG TOKENS"]

    collecting = threading.Thread(target=collect)
    collecting.start()
    try:
        work(endpoint, "contained", SMALL.layout.chunk_tokens, theirs)
    finally:
        theirs.close()
        collecting.join()
        print(wrong, lookups, flush=True)
