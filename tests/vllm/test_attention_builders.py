"""Metadata builders on a device that copies late: what it reads is what was built, and few builds wait for it."""

from types import SimpleNamespace

import pytest
import torch

from blendhub.vllm.model.attention_metadata import OwnGroup
from tests.stand_in import StandIn


class Device:
    """Work waits until something synchronizes; an event is reached when all work before it was done."""

    def __init__(self):
        self.pending = []
        self.n_done = 0
        self.waits = []
        """For each wait: how many pieces of work were submitted after what it waited for."""

    def run_to(self, n):
        while self.n_done < n:
            self.pending[self.n_done]()
            self.n_done += 1


class Event:
    def __init__(self, device):
        self._device = device
        self._reached = None

    def record(self):
        self._reached = len(self._device.pending)

    def synchronize(self):
        self._device.waits.append(len(self._device.pending) - self._reached)
        self._device.run_to(self._reached)


class Builder:
    """Keeps its numbers in memory that the device reads later, or makes new memory each time."""

    def __init__(self, device, keeps):
        self._device = device
        if keeps == "in a plan":
            self.wrapper = SimpleNamespace(workspace=torch.zeros(1))
        elif keeps == "itself":
            self.workspace = torch.zeros(1)

    def build(self, number):
        memory = getattr(self, "workspace", None)
        memory = memory if memory is not None else getattr(getattr(self, "wrapper", None), "workspace", None)
        memory = torch.zeros(1) if memory is None else memory
        memory.fill_(number)
        found = []
        self._device.pending.append(lambda: found.append(int(memory)))
        return found


def group_on(device, keeps):
    made = []

    def create():
        builder = Builder(device, keeps)
        made.append(builder)
        return SimpleNamespace(get_metadata_builder=lambda: builder)

    return OwnGroup(create, lambda: Event(device)), made


def forwards(group, device, n):
    """What the device read for each of the forwards, of which each submits some more work."""
    found = []
    for number in range(n):
        found.append(group.build(lambda own, number=number: own.get_metadata_builder().build(number)))
        device.pending.append(lambda: None)
    device.run_to(len(device.pending))
    return [one[0] for one in found]


def test_builders_that_keep_no_host_memory_wait_for_nothing():
    device = Device()
    group, made = group_on(device, "")
    assert forwards(group, device, 10) == list(range(10))
    assert len(made) == 1 and device.waits == []


@pytest.mark.parametrize("keeps", ["itself", "in a plan"])
def test_builders_that_keep_host_memory_take_turns_and_never_wait_for_the_last_forward(keeps):
    device = Device()
    group, made = group_on(device, keeps)
    assert forwards(group, device, 10) == list(range(10))
    # A whole forward, which is two pieces of work here, and the end of another one.
    assert len(made) == 2 and device.waits == [3] * 8


def test_where_the_host_computes_there_is_one_builder():
    device = Device()
    group = OwnGroup(lambda: StandIn(get_metadata_builder=lambda: Builder(device, "itself")), None)
    group.build(lambda own: None)
    assert group.first and device.waits == []
