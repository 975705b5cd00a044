"""An engine is held to a model card: without one that permits it, it blends nothing, and a sentence says why."""

from types import SimpleNamespace

import msgspec
import pytest

from blendhub.core.layout import KVLayout
from blendhub.core.plugin_choice import PluginChoice
from blendhub.outcome.model_card import Figure, ModelCard
from blendhub.vllm.model_support import ModelSupport, permitted
from blendhub.vllm.settings import Settings

LAYOUT = KVLayout(layers=2, kv_heads=2, key_dim=8, value_dim=8, dtype="float32")
SUPPORT = ModelSupport((LAYOUT,), True, (), True)
SERVED = SimpleNamespace(model="/models/tiny", dtype="torch.float32")
CARD = ModelCard("org/tiny", "float32", 16, (Figure("hkvd", {"layer": 2}, 0.15, 48, 50, 0.87),))
SETTINGS = Settings(selector=PluginChoice("hkvd", {"layer": 2}), recompute_ratio=0.15, expected_agreement=0.85)


def asked(tmp_path, card=CARD, served=SERVED, support=SUPPORT, **changes) -> ModelSupport:
    file = tmp_path / "card.md"
    block = card if isinstance(card, str) else msgspec.json.encode(card).decode()
    file.write_text(f"# A model\n\n```sh\nflag\n```\n\n```json\n{block}\n```\n")
    settings = msgspec.structs.replace(SETTINGS, **({"model_card": str(file)} | changes))
    return permitted(support, settings, served)


def test_a_card_that_shows_the_agreement_permits_and_without_a_card_none_is_asked_for(tmp_path):
    assert asked(tmp_path) == SUPPORT
    assert asked(tmp_path, model_card="", expected_agreement=1.0) == SUPPORT


def test_what_the_model_does_not_support_stays_as_it_is(tmp_path):
    exact_only = ModelSupport((LAYOUT,), False, ("keys cannot be moved",))
    assert asked(tmp_path, support=exact_only, expected_agreement=1.0) == exact_only


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_card": "/nowhere/card.md"}, "No such file or directory"),
        ({"model_card": "/nowhere/card.md"}, "`blendhub advise --model /models/tiny --data FILE --card /nowhere/"),
        ({"card": '{"model": "org/tiny"}'}, "is no card that can be read"),
        ({"card": "{"}, "is no card that can be read"),
        ({"served": SimpleNamespace(model="other", dtype="torch.float32")}, "model tiny, and this engine serves other"),
        ({"served": SimpleNamespace(model="tiny", dtype="torch.half")}, "dtype float32, and this engine serves half"),
        ({"selector": PluginChoice("first_k")}, "no figures of first_k at recompute_ratio 0.15, only of hkvd at 0.15"),
        ({"selector": PluginChoice("hkvd")}, "has no figures of hkvd at recompute_ratio 0.15"),
        ({"recompute_ratio": 0.3}, "has no figures of hkvd {'layer': 2} at recompute_ratio 0.3"),
        (
            {"expected_agreement": 0.9},
            "says that 48 of 50 answers agree with hkvd {'layer': 2} at recompute_ratio 0.15, which shows an agreement "
            "of 0.87, and expected_agreement is 0.9",
        ),
    ],
)
def test_only_exact_prefixes_are_reused_where_the_card_does_not_permit_more(changes, why, tmp_path):
    held = asked(tmp_path, **changes)
    assert (held.layouts, held.blends, held.audits) == ((LAYOUT,), False, False)
    (reason,) = held.reasons
    assert reason.startswith("only exact prefixes are reused: kv_connector_extra_config.blendhub.model_card, ")
    assert why in reason and "\n" not in reason
