"""Time spent in collectives, with a fake backend; test_zero_jsons.py covers real collectives in real runs."""

import time
from typing import Any

import pytest
import torch

from tests.ops.comparing import on_gpu
from z2all_ds.train.hooks.communication import CommunicationTime

CPU = torch.device("cpu")
PAUSE_SECONDS = 0.02


class Work:
    """A handle of an asynchronous collective."""

    name = "of the real one"

    def wait(self) -> bool:
        time.sleep(PAUSE_SECONDS)
        return True


class Backend:
    """A fake backend that sends nothing; its collectives take `PAUSE_SECONDS`."""

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


def test_a_collective_that_calls_another_counts_once_from_call_to_return() -> None:
    backend, communication = measured()
    began = time.perf_counter()
    backend.all_reduce(None)
    backend.broadcast(None)  # calls all_reduce
    passed = time.perf_counter() - began
    time.sleep(PAUSE_SECONDS)
    assert backend.get_rank() == 3
    assert 2 * PAUSE_SECONDS <= communication.take() <= passed
    assert communication.take() == 0.0


def test_an_asynchronous_collective_counts_only_while_it_is_waited_for() -> None:
    backend, communication = measured()
    work = backend.all_reduce(None, async_op=True)
    assert work is not None and work.name == "of the real one"
    assert communication.take() < PAUSE_SECONDS
    time.sleep(PAUSE_SECONDS)
    began = time.perf_counter()
    assert work.wait() is True
    assert PAUSE_SECONDS <= communication.take() <= time.perf_counter() - began


def test_measuring_continues_after_a_collective_fails() -> None:
    backend, communication = measured()
    with pytest.raises(RuntimeError, match="lost"):
        backend.reduce(None)
    backend.all_reduce(None)
    assert communication.take() >= PAUSE_SECONDS


def test_close_restores_the_backend() -> None:
    backend, communication = measured()
    assert vars(backend)
    communication.close()
    assert not vars(backend)
    backend.all_reduce(None)
    assert communication.take() == 0.0


def test_nothing_is_wrapped_with_a_single_rank() -> None:
    backend, communication = measured(world_size=1)
    assert not vars(backend)
    backend.all_reduce(None)
    assert communication.take() == 0.0
    communication.close()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_measuring_on_a_gpu_does_not_synchronize(device: str) -> None:
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
