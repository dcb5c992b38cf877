"""Analysis of flight recorder files, in the format that torch 2.11 wrote on a GPU (see test_nccl_nodes)."""

import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.train.processes import flight_recorder


def entry(number: int, state: str = "completed", group: str = "1", name: str = "all_reduce") -> dict[str, Any]:
    return {
        "process_group": (group, "undefined"),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "state": state,
        "is_p2p": False,
    }


def recording(*entries: dict[str, Any]) -> dict[str, Any]:
    last: dict[str, int] = {}
    for one in entries:
        group = one["process_group"][0]
        last[group] = max(last.get(group, 0), one["collective_seq_id"])
    return {
        "version": "2.10",
        "pg_status": {group: {"last_enqueued_collective": number} for group, number in last.items()},
        "entries": list(entries),
    }


def write(run: RunFolder, rank: int, content: Any) -> Path:
    run.flights.mkdir(parents=True, exist_ok=True)
    path = run.flights / f"rank_{rank}"
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def test_a_rank_that_has_not_started_a_collective_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    waits = recording(entry(6), entry(7, "scheduled"), entry(8, "scheduled"))
    for rank in (0, 2, 3):
        write(run, rank, waits)
    write(run, 1, recording(entry(5), entry(6)))
    assert flight_recorder.unfinished_lines(run) == ["all_reduce 7 of group 1: started by ranks 0, 2, 3, not by rank 1"]


def test_collectives_that_all_ranks_have_started_are_listed_last(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    stuck = entry(3, "started", "0", "reduce_scatter")
    write(run, 0, recording(stuck, entry(9, "scheduled", "1", "all_gather")))
    write(run, 1, recording(stuck, entry(8, group="1")))
    assert flight_recorder.unfinished_lines(run) == [
        "all_gather 9 of group 1: started by rank 0, not by rank 1",
        "reduce_scatter 3 of group 0: started by ranks 0, 1, not finished",
    ]


def test_members_of_other_groups_are_not_reported_as_missing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write(run, 0, recording(entry(7, "scheduled", "2")))
    write(run, 1, recording(entry(1, group="3")))
    assert flight_recorder.unfinished_lines(run) == ["all_reduce 7 of group 2: started by rank 0, not finished"]


def test_ranks_that_wait_for_nothing_give_no_lines(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert flight_recorder.unfinished_lines(run) == []
    write(run, 0, recording(entry(7)))
    assert flight_recorder.unfinished_lines(run) == []


@pytest.mark.parametrize("content", [{"pg_status": [], "entries": [{"state": 1}]}, {"pg_status": {}, "entries": 3}, 7])
def test_an_unknown_format_gives_no_lines(content: Any, tmp_path: Path) -> None:
    write(RunFolder(tmp_path), 0, content)
    assert flight_recorder.unfinished_lines(RunFolder(tmp_path)) == []


def test_incomplete_files_and_files_with_code_are_not_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    path = write(run, 0, recording(entry(7, "scheduled")))
    assert flight_recorder.read_flight(run, 0)
    path.write_bytes(path.read_bytes()[:-20])
    assert flight_recorder.read_flight(run, 0) is None

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    write(run, 0, {"pg_status": {}, "entries": [Evil()]})
    assert flight_recorder.read_flight(run, 0) is None
    assert not (tmp_path / "made").exists()


def test_a_rank_is_asked_through_its_pipe_and_waited_for(tmp_path: Path) -> None:
    run, pipe = RunFolder(tmp_path), flight_recorder.pipe_of(tmp_path, 1)
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def answer() -> None:
        while not os.read(reading, 10):
            time.sleep(0.01)
        time.sleep(0.3)
        write(run, 1, recording(entry(7, "scheduled")))

    rank = threading.Thread(target=answer)
    rank.start()
    flight_recorder.ask_for(run, tmp_path, [0, 1])  # rank 0 has no pipe
    assert flight_recorder.unfinished_lines(run) == ["all_reduce 7 of group 1: started by rank 1, not finished"]
    rank.join()
    os.close(reading)


def test_a_pipe_without_a_reader_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "PATIENCE_SECONDS", 60.0)
    os.mkfifo(flight_recorder.pipe_of(tmp_path, 0))
    began = time.monotonic()
    flight_recorder.ask_for(RunFolder(tmp_path), tmp_path, [0])
    assert time.monotonic() - began < 30.0
    assert flight_recorder.read_flights(RunFolder(tmp_path)) == {}


def test_user_settings_are_kept_and_an_old_record_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # set and deleted, so that monkeypatch removes it again after the test
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    old = write(RunFolder(tmp_path), 3, recording())
    flight_recorder.switch_on(RunFolder(tmp_path), tmp_path / "pipes", 3)
    assert not old.exists()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "0"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "3" == str(old)
    assert os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "3.pipe" == str(
        flight_recorder.pipe_of(tmp_path / "pipes", 3)
    )
