"""Tests of the worker process of an agent: answers, failures, and the ways in which it can end."""

from collections.abc import Iterator

import pytest

from tests.helpers.command import ROOT
from z2all_ds.cluster.agents.agent import Worker

pytestmark = pytest.mark.processes


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("tests.cluster.agents.echo_worker", {"PYTHONPATH": str(ROOT)})
    yield worker
    worker.end()


def test_a_worker_still_answers_after_a_failed_order(worker: Worker) -> None:
    assert worker.ask({"do": "one"}, 60) == {"answer": "one"}
    assert worker.ask({"do": "fail"}, 60) == {"problem": "it hurts"}
    assert worker.ask({"do": "two"}, 60) == {"answer": "two"}


@pytest.mark.parametrize(
    ("order", "said"), [("die", "ended by SIGKILL"), ("exit", "ended with code 1 (no such library)")]
)
def test_every_order_reports_that_the_worker_has_ended(worker: Worker, order: str, said: str) -> None:
    for each in (order, "one more"):
        assert worker.ask({"do": each}, 60) == {"problem": said, "ended": True}


def test_a_worker_that_exceeds_the_time_limit_is_killed(worker: Worker) -> None:
    assert worker.ask({"do": "one"}, 60) == {"answer": "one"}
    assert worker.ask({"do": "two", "seconds": 600}, 0.2) == {"problem": "not done within 0 s", "late": True}
    assert worker.ask({"do": "three"}, 60) == {"problem": "ended by SIGKILL", "ended": True}
