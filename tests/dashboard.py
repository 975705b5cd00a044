"""The dashboard's queries, as Grafana would send them."""

import json
from collections.abc import Iterator
from pathlib import Path

DEPLOY = Path(__file__).parent.parent / "deploy"
DASHBOARD, ALERTS = DEPLOY / "grafana/blendhub.json", DEPLOY / "prometheus/alerts.yaml"
VARIABLES = {"$__rate_interval": "1m", "$hubs": ".*", "$engines": ".*"}


def queries() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield query
