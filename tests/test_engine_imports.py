"""What an engine's interpreter imports before it is forked."""

from importlib.util import find_spec

import pytest

from harness.engines import template
from harness.engines.template import IMPORTED, import_if_there


def test_packages_may_be_absent_and_modules_of_others_too(monkeypatch):
    monkeypatch.setattr(template, "OTHERS", ("email",))
    for module in ("no_such_package.module", "email.no_such_module"):
        import_if_there(module)


def test_a_module_of_this_repository_that_was_renamed_is_an_error():
    with pytest.raises(ModuleNotFoundError, match=r"blendhub\.no_such_module"):
        import_if_there("blendhub.no_such_module")
    ours = [module for module in IMPORTED if module.startswith("blendhub")]
    assert [module for module in ours if find_spec(module.partition(".")[0]) and not find_spec(module)] == []
