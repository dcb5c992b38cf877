"""The time from the start of the command to the first loss, by phase."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.helpers.command import ROOT
from z2all_ds.train.processes.startup import ASKED_VARIABLE, PHASES, Startup, process_age_seconds

PAUSE_SECONDS = 0.3
TWO_IN_ONE_PROCESS = f"""
import json, time
time.sleep({PAUSE_SECONDS})
from z2all_ds.train.processes.startup import Startup
events = []
for _ in range(2):
    startup = Startup()
    startup.done("imports")
    events.append(startup.as_event())
print(json.dumps(events))
"""
MODULES_OF_AN_ENGINE = """
import sys
from tests.zero.engines import tiny_engine, train
with tiny_engine("cpu", "deepspeed={json}") as (engine, _):
    train(engine, 1)
print(*sorted(sys.modules))
"""
TICK_SECONDS = 0.02
"""The kernel records the start of a process in hundredths of a second."""


def test_the_first_training_counts_from_process_start_and_later_ones_from_their_own() -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", TWO_IN_ONE_PROCESS]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    passed = time.monotonic() - began
    first, second = json.loads(result.stdout)
    assert PAUSE_SECONDS - TICK_SECONDS <= first["seconds"] <= passed + TICK_SECONDS
    assert 0 <= second["seconds"] < PAUSE_SECONDS / 2


def test_the_time_before_the_process_started_counts_as_launch() -> None:
    asked = {ASKED_VARIABLE: str(time.monotonic() - 5.0)}
    command = [sys.executable, "-c", TWO_IN_ONE_PROCESS]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **asked})
    first, second = json.loads(result.stdout)
    assert 5.0 - TICK_SECONDS <= first["launch_seconds"] <= first["seconds"] - first["imports_seconds"] + TICK_SECONDS
    assert second["launch_seconds"] == 0


def test_the_process_age_grows_with_the_clock() -> None:
    before, began = process_age_seconds(), time.monotonic()
    time.sleep(0.05)
    assert 0.05 <= process_age_seconds() - before <= time.monotonic() - began + TICK_SECONDS


def test_phases_add_up_to_the_total_and_may_be_repeated() -> None:
    startup = Startup()
    for phase in ("imports", "data", "imports", "model", "first_step"):
        time.sleep(0.001)
        startup.done(phase)
    event = startup.as_event()
    assert set(event) == {"seconds", *(f"{phase}_seconds" for phase in PHASES)}
    phases = [event[f"{phase}_seconds"] for phase in PHASES]
    assert abs(sum(phases) - event["seconds"]) < 0.0005 * (len(PHASES) + 1)  # each is rounded
    assert event["imports_seconds"] >= 0.002 and event["model_seconds"] >= 0.001
    assert event["engine_seconds"] == event["restore_seconds"] == 0


def test_the_line_names_only_phases_that_took_time() -> None:
    startup = Startup()
    startup.done("imports")
    time.sleep(0.06)
    startup.done("process_group")
    startup.done("restore")
    line = startup.line()
    assert line.startswith(f"first loss after {startup.total_seconds:.1f} s: ")
    assert "process group 0.1" in line and "restore" not in line and "engine" not in line


@pytest.mark.parametrize("json", ["zero1", "zero3"])
def test_an_engine_does_not_load_the_compiler(json: str) -> None:
    """Loading the compiler takes seconds, and only `train.compile` needs it."""
    command = [sys.executable, "-c", MODULES_OF_AN_ENGINE.format(json=json)]
    modules = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "deepspeed.runtime.zero.muon.original_muon" in modules
    assert "torch._inductor.compile_fx" not in modules
