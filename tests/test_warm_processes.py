"""Tests of the forked processes that tests use (helpers/warm_process.py)."""

import multiprocessing
import os
from contextlib import ExitStack

import pytest

pytestmark = pytest.mark.processes


def test_workers_start_whatever_numbers_their_descriptors_have() -> None:
    """Copies made while a process starts had the numbers from 200 on, and replaced a pipe with such a number."""
    spawn, last = multiprocessing.get_context("spawn"), 0
    with ExitStack() as files:
        while last < 210:
            last = files.enter_context(open(os.devnull)).fileno()
            if last > 190:
                worker = spawn.Process(target=os.getpid)
                worker.start()
                worker.join(60)
                assert worker.exitcode == 0
