"""Stops a rank at a certain moment of a load, which ranks that are forked from the engine's process inherit.

The file ``PLACE/RANK`` says when, and for how long: "before copy 1.5" stops that rank before the next copy to its pages
begins.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from blendhub_cpu.device import CpuDevice
from vllm.distributed.parallel_state import get_tp_group

from blendhub.client.hub_client import HubClient
from blendhub.vllm.model.engine_model import EngineModel
from tests.vllm import forked_ranks


def arrange(place: str) -> None:
    forked_ranks.arrange()
    moments = [
        (CpuDevice, "load", "copy"),
        (EngineModel, "forward", "recompute"),
        (HubClient, "release", "release"),
    ]
    for owner, method, name in moments:
        setattr(owner, method, _obedient(getattr(owner, method), name, Path(place)))


def _obedient(work: Any, name: str, place: Path) -> Any:
    def obey(*given: Any, **named: Any) -> Any:
        _obey(place, f"before {name}")
        result = work(*given, **named)
        _obey(place, f"after {name}")
        return result

    return obey


def _obey(place: Path, moment: str) -> None:
    try:
        order = place / str(get_tp_group().rank_in_group)
        said, seconds = order.read_text().rsplit(" ", 1)
    except (AssertionError, OSError):  # a process without ranks, or no order
        return
    if said == moment:
        order.unlink()
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
