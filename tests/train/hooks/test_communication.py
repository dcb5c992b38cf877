"""Time in collectives. Real ones, in real runs, are looked at in test_zero_jsons.py."""

import time
from typing import Any

import pytest
import torch

from tests.ops.comparing import on_gpu
from z2all_ds.train.hooks.communication import CommunicationTime

CPU = torch.device("cpu")
PAUSE_SECONDS = 0.02


class Work:
    """Of a collective under way."""

    name = "of the real one"

    def wait(self) -> bool:
        time.sleep(PAUSE_SECONDS)
        return True


class Backend:
    """Sends nothing and takes its time."""

    def all_reduce(self, tensor: Any, async_op: bool = False) -> Work | None:
        if async_op:
            return Work()
        time.sleep(PAUSE_SECONDS)
        return None

    def broadcast(self, tensor: Any) -> None:
        self.all_reduce(tensor)

    def reduce(self, tensor: Any) -> None:
        raise RuntimeError("lost")

    def get_rank(self) -> int:
        return 3


def measured(world_size: int = 2) -> tuple[Backend, CommunicationTime]:
    backend = Backend()
    return backend, CommunicationTime(backend, CPU, world_size)


def test_a_call_counts_from_beginning_to_end_and_once() -> None:
    backend, communication = measured()
    began = time.perf_counter()
    backend.all_reduce(None)
    backend.broadcast(None)  # made of another
    passed = time.perf_counter() - began
    time.sleep(PAUSE_SECONDS)
    assert backend.get_rank() == 3
    assert 2 * PAUSE_SECONDS <= communication.take() <= passed
    assert communication.take() == 0.0


def test_what_runs_beside_computation_counts_while_it_is_waited_for() -> None:
    backend, communication = measured()
    work = backend.all_reduce(None, async_op=True)
    assert work is not None and work.name == "of the real one"
    assert communication.take() < PAUSE_SECONDS
    time.sleep(PAUSE_SECONDS)
    began = time.perf_counter()
    assert work.wait() is True
    assert PAUSE_SECONDS <= communication.take() <= time.perf_counter() - began


def test_after_an_error_it_goes_on() -> None:
    backend, communication = measured()
    with pytest.raises(RuntimeError, match="lost"):
        backend.reduce(None)
    backend.all_reduce(None)
    assert communication.take() >= PAUSE_SECONDS


def test_closed_it_leaves_nothing_behind() -> None:
    backend, communication = measured()
    assert vars(backend)
    communication.close()
    assert not vars(backend)
    backend.all_reduce(None)
    assert communication.take() == 0.0


def test_a_rank_alone_is_left_as_it_is() -> None:
    backend, communication = measured(world_size=1)
    assert not vars(backend)
    backend.all_reduce(None)
    assert communication.take() == 0.0
    communication.close()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_on_a_gpu_nothing_waits_for_it(device: str) -> None:
    class Sleeps(Backend):
        def all_reduce(self, tensor: Any, async_op: bool = False) -> None:
            torch.cuda._sleep(200_000_000)  # a tenth of a second at 2 GHz

    backend = Sleeps()
    communication = CommunicationTime(backend, torch.device(device), 2)
    torch.cuda.synchronize()
    began = time.perf_counter()
    backend.all_reduce(None)
    early = communication.take()
    assert time.perf_counter() - began < 0.02 and early == 0.0
    torch.cuda.synchronize()
    assert 0.02 < communication.take() <= time.perf_counter() - began
