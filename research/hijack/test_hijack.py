"""The committed attack: what it does to those who ask about a stranger's document, and where it does nothing."""

import pytest

from benchmarks.quality.workloads import Chat
from harness.engines.real_model import NoRealModel, make_real_model
from research.hijack.__main__ import Service
from research.hijack.prompts import Prompts, prefix

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
VICTIMS = 4


def test_a_stranger_steers_answers_only_as_a_donor():
    from transformers import AutoTokenizer

    try:
        prompts = Prompts(Chat(AutoTokenizer.from_pretrained(make_real_model())))
    except NoRealModel as error:
        pytest.skip(str(error))
    hostile, harmless = prompts.context(0, prefix()), prompts.context(1)
    service = Service("trusted", prompts, prompts.victims(VICTIMS))
    none, all_moved = [False] * VICTIMS, [len(prompts.document)] * VICTIMS
    with service.engine:
        service.store(hostile, "attacked")
        assert service.hijacked("attacked") == (none, [0] * VICTIMS)
        service.store(harmless, "attacked", donate=True)
        assert service.hijacked("attacked") == (none, all_moved)
        service.store(hostile, "poisoned", donate=True)
        hijacked, moved = service.hijacked("poisoned")
        assert any(hijacked) and moved == all_moved
