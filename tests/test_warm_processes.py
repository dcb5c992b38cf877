"""Tests of the forked processes that tests use (helpers/warm_process.py)."""

import multiprocessing
import os
from contextlib import ExitStack

import pytest

pytestmark = pytest.mark.processes


def test_workers_start_whatever_numbers_their_descriptors_have() -> None:
    """A worker whose pipe had a number between 200 and 206 once ended before it had begun."""
    spawn, last = multiprocessing.get_context("spawn"), 0
    with ExitStack() as files:
        while last < 210:
            last = files.enter_context(open(os.devnull)).fileno()
            if last > 190:
                worker = spawn.Process(target=os.getpid)
                worker.start()
                worker.join(60)
                assert worker.exitcode == 0
