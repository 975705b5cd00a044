"""What the two sides of the connector tell each other."""

import pickle
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from blendhub.vllm.messages import LoadedAdapter, LoadResult, WorkerProof, WorkerReport
from blendhub.vllm.model_support import ModelSupport

outcomes = st.one_of(
    st.builds(LoadResult, holes=st.integers(0, 9), error=st.sampled_from(["", "no"])),
    st.just(LoadResult(error="another rank failed", another_failed=True)),
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
        report.proofs = {rank: WorkerProof(rank, ModelSupport((), True, ()))}
    before = pickle.dumps(ranks)
    whole = ranks[0]
    for report in ranks[1:]:
        whole = whole.aggregate(report)
    assert pickle.dumps(ranks) == before
    assert whole.loads.keys() == {request for report in ranks for request in report.loads}
    for request, result in whole.loads.items():
        results = [report.loads[request] for report in ranks if request in report.loads]
        assert result in results and bool(result.error) == any(other.error for other in results)
        telling = [other for other in results if (other.error and not other.another_failed)]
        told = any(other.error for other in telling) or not any(other.error for other in results)
        assert not (telling and told) or result in telling, "the reason of the rank that failed"
    assert whole.opened == sum(report.opened for report in ranks)
    # Ranks save their shards of the same tokens, but each fails by itself.
    assert whole.saved_tokens == max(report.saved_tokens for report in ranks)
    for name in ("committed_ranks", "failed_saves"):
        assert getattr(whole, name) == sum((Counter(getattr(report, name)) for report in ranks), Counter())
    assert whole.adapters.keys() == whole.proofs.keys() == set(range(len(ranks)))
