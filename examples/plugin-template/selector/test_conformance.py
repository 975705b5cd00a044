"""The suite that ships with BlendHub, run on this selector."""

from edges_selector import EdgesOptions, EdgesSelector

from blendhub.testing import SelectorSuite


class TestEdgesSelector(SelectorSuite):
    capabilities = ("own_ratio",)

    def create(self) -> EdgesSelector:
        return EdgesSelector(EdgesOptions(k=8))
