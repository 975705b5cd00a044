"""What the two sides of the connector tell each other."""

import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.messages import HubAddress, HubPlace, LoadedAdapter, LoadResult, StepPlan, WorkerProof, WorkerReport
from blendhub.vllm.model_support import ModelSupport

LAYOUT = KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=8)
outcomes = st.one_of(
    st.builds(LoadResult, holes=st.integers(0, 9), error=st.sampled_from(["", "no"])),
    st.just(LoadResult(error="another rank failed", another_failed=True)),
    st.just(LoadResult(audit=AuditOutcome(agrees=True, kl=0.5, tokens=1, agreed_tokens=1))),
)
reports = st.builds(
    WorkerReport,
    loads=st.dictionaries(st.sampled_from("abc"), outcomes),
    saved_tokens=st.integers(0, 9),
    failed_saves=st.dictionaries(st.sampled_from(["Busy", "HubError"]), st.integers(1, 3)),
    opened=st.integers(0, 1),
    committed_ranks=st.dictionaries(st.sampled_from("ab"), st.just(1)),
)


@given(st.lists(reports, min_size=1, max_size=4))
def test_the_reports_of_all_ranks_become_one(ranks):
    for rank, report in enumerate(ranks):
        report.adapters = {rank: {5: LoadedAdapter("weights", rank)}}
        report.proofs = {rank: WorkerProof(rank, ModelSupport((LAYOUT,), True, ()))}
    before = pickle.dumps(ranks)
    whole = ranks[0]
    for report in ranks[1:]:
        whole = whole.aggregate(report)
    assert pickle.dumps(ranks) == before
    assert whole.loads.keys() == {request for report in ranks for request in report.loads}
    for request, result in whole.loads.items():
        results = [report.loads[request] for report in ranks if request in report.loads]
        assert result in results and bool(result.error) == any(other.error for other in results)
        telling = [other for other in results if (other.error and not other.another_failed) or other.audit]
        told = any(other.error for other in telling) or not any(other.error for other in results)
        assert not (telling and told) or result in telling, "the reason of the rank that failed, or the audit"
    assert whole.opened == sum(report.opened for report in ranks)
    # Ranks save their shards of the same tokens, but each fails by itself.
    assert whole.saved_tokens == max(report.saved_tokens for report in ranks)
    for name in ("committed_ranks", "failed_saves"):
        assert getattr(whole, name) == sum((Counter(getattr(report, name)) for report in ranks), Counter())
    assert whole.adapters.keys() == whole.proofs.keys() == set(range(len(ranks)))


def test_a_plan_is_pickled_without_a_look_at_other_modules():
    """Python looks through all modules for an object that does not say where it is, and so imports some of them."""
    place = HubPlace(HubAddress("ipc://hub", PluginChoice("zmq")), Namespace(model="m", layout=LAYOUT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "whichmodule", lambda value, name: value.__module__)
        in_python: Any = pickle
        in_python._dumps(StepPlan(hub=place), protocol=pickle.HIGHEST_PROTOCOL)
