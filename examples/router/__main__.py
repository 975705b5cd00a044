"""``python -m examples.router --backend ENGINE HUB --backend ENGINE HUB``: see docs/routing.md."""

import argparse
import os

import uvicorn

from examples.router.app import make_app
from examples.router.scores import Backend


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.router", description="Send each request where most of its prompt is reused."
    )
    parser.add_argument(
        "--backend",
        nargs=2,
        action="append",
        required=True,
        metavar=("ENGINE", "HUB"),
        help="the URLs of an engine's server and of its hub's /metrics, without a path; repeat for each engine",
    )
    parser.add_argument("--model", default="", help="the model's name in the hubs, if they have several")
    parser.add_argument("--score-timeout-s", type=float, default=0.1, help="how long a hub may take for a score")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    backends = [Backend(*(url.rstrip("/") for url in pair)) for pair in given.backend]
    # Not an argument: other users of the machine see those.
    token = os.environ.get("BLENDHUB_SCORE_TOKEN", "")
    app = make_app(backends, model=given.model, token=token, timeout_s=given.score_timeout_s)
    uvicorn.run(app, host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
