"""What happens again and again is said once, then counted."""

import logging

from blendhub.system import recurring
from blendhub.system.recurring import RecurringWarnings


def test_each_kind_is_said_once_until_its_time_has_come_again(caplog, monkeypatch):
    warnings = RecurringWarnings(logging.getLogger("full"))
    for number in range(5):
        warnings.warn("disk", f"no room for {number}")
        warnings.warn("memory", "none left")
    assert [record.message.partition(";")[0] for record in caplog.records] == ["no room for 0", "none left"]
    monkeypatch.setattr(recurring, "AGAIN_S", 0.0)
    warnings.warn("disk", "no room for 5", KeyError("a fault"))
    assert "no room for 5 (and 4 times more since this was said last)" in caplog.records[-1].message
    assert caplog.records[-1].exc_info, "where the fault is"
