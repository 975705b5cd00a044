"""Every metric by its name, with its meaning, from the tables that the code is made from."""

from blendhub.hub.http.metrics import (
    AGREEMENT,
    COUNTERS,
    COUNTERS_OF_NAMESPACE,
    GAUGES,
    HISTOGRAMS,
    OF_NAMESPACE,
    REFUSED,
)

OF_HUB = {
    **{f"{name}_total": about for name, about in [*COUNTERS.items(), REFUSED, *COUNTERS_OF_NAMESPACE.items()]},
    **HISTOGRAMS,
    **GAUGES,
    **OF_NAMESPACE,
    **AGREEMENT,
}
"""Without the prefix ``blendhub_``, and without what shared stores count."""
