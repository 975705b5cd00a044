"""What `make gpu-check` and `make npu-check` start engines with."""

from importlib.metadata import distributions, entry_points

import pytest

from benchmarks import hardware_check


@pytest.mark.parametrize("group", ["blendhub", "vllm.general_plugins"])
def test_a_checkout_that_is_not_installed_has_the_entry_points_of_its_packages(tmp_path, group):
    metadata, *packages = hardware_check.paths_of_the_checkout(tmp_path / "metadata")
    written = {
        (one.name, one.value)
        for made in distributions(path=[str(metadata)])
        for one in made.entry_points.select(group=group)
    }
    installed = {(one.name, one.value) for one in entry_points(group=group) if one.value.startswith("blendhub")}
    assert written == installed
    assert all((path / "pyproject.toml").exists() for path in packages)
