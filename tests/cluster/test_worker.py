"""A process held by an agent: answers, failures, and ends of every kind."""

from collections.abc import Iterator

import pytest

from tests.helpers.command import ROOT
from z2all_ds.cluster.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("tests.cluster.echo_worker", {"PYTHONPATH": str(ROOT)})
    yield worker
    worker.end()


def test_answers_and_problems(worker: Worker) -> None:
    assert worker.ask({"do": "one"}, 60) == "one"
    with pytest.raises(RuntimeError, match="it hurts"):
        worker.ask({"do": "fail"}, 60)
    assert worker.ask({"do": "two"}, 60) == "two"


@pytest.mark.parametrize(("order", "said"), [("die", "ended by SIGKILL"), ("exit", "code 1 .no such library")])
def test_an_end_is_told_to_all_who_ask(worker: Worker, order: str, said: str) -> None:
    for each in (order, "one more"):
        with pytest.raises(RuntimeError, match=said):
            worker.ask({"do": each}, 60)


def test_one_that_is_late_is_ended(worker: Worker) -> None:
    assert worker.ask({"do": "one"}, 60) == "one"
    with pytest.raises(RuntimeError, match="not done within 0 s"):
        worker.ask({"do": "two", "seconds": 600}, 0.2)
    with pytest.raises(RuntimeError, match="ended by SIGKILL"):
        worker.ask({"do": "three"}, 60)
