"""Ranks that end when their owner is gone, tested with real processes and SIGKILL."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.processes import ended
from z2all_ds.base import parent_watch
from z2all_ds.base.errors import EXIT_INTERRUPTED
from z2all_ds.base.machine import process_start_time

OWNER = """
import time
from z2all_ds.base.parent_watch import owner_mark

print(owner_mark(), flush=True)
time.sleep(60)
"""
RANK = """
import threading
from z2all_ds.base.parent_watch import follow_owner

follow_owner()
print([thread.name for thread in threading.enumerate()], flush=True)
input()  # as deaf as a rank in a collective that never ends: only the watch can end it
"""
WATCHING, ALONE = "['MainThread', 'owner-watch']\n", "['MainThread']\n"


def start_owner() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)


def start_rank(mark: str | None) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != parent_watch.OWNER_VARIABLE}
    if mark is not None:
        environment[parent_watch.OWNER_VARIABLE] = mark
    command = [sys.executable, "-c", RANK]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def test_the_owner_mark_is_the_pid_and_the_start_time() -> None:
    assert parent_watch.owner_mark() == f"{os.getpid()}:{process_start_time(os.getpid())}"


def test_a_rank_ends_after_its_owner_is_killed() -> None:
    with ended(start_owner()) as owner:
        assert owner.stdout
        mark = owner.stdout.readline().strip()
        with ended(start_rank(mark)) as rank:
            assert rank.stdout
            assert rank.stdout.readline() == WATCHING
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(2 * parent_watch.CHECK_EVERY_SECONDS)
            owner.send_signal(signal.SIGKILL)  # not reaped yet: a zombie counts as gone, too
            assert rank.wait(20) == EXIT_INTERRUPTED == 130


def test_a_rank_ends_if_the_pid_of_its_owner_belongs_to_another_process() -> None:
    with ended(start_rank(f"{os.getpid()}:{(process_start_time(os.getpid()) or 0) + 1}")) as rank:
        assert rank.wait(20) == EXIT_INTERRUPTED


@pytest.mark.parametrize("mark", [None, "", "x", ":5"])
def test_no_watch_starts_without_a_valid_owner_mark(mark: str | None) -> None:
    with ended(start_rank(mark)) as rank:
        assert rank.stdout
        assert rank.stdout.readline() == ALONE
