"""Input errors that the ranks find themselves, as under `deepspeed --hostfile`, where no parent process checks.

The ranks print one line, and all of them end.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers.training import run_arguments
from z2all_ds.base.machine import free_port
from z2all_ds.train.processes.local_ranks import local_command

RANKS = 2
SECONDS = 10
"""Time within which every rank must end."""


def a_json(folder: Path, content: dict[str, object]) -> str:
    path = folder / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, **content}))
    return f"deepspeed={path}"


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("train.global_batch=6", 2, ["train.global_batch=6", "2 × 2"]),
        ("JSON_WITH_A_TYPO", 2, ["zero_optimisation", "zero_optimization"]),
        ("JSON_FOR_A_GPU", 2, ["aio.use_gds", "needs a GPU"]),
        ("data.tokenizer=/nowhere", 3, ["/nowhere", "no such folder"]),
        ("model.vocab_size=512", 3, ["1012 ids", "model.vocab_size=512"]),
        ("train.nvme_folder=/proc/none", 2, ["nvme_path /proc/none", "cannot be written"]),
    ],
)
def test_rank_0_prints_the_error_and_all_ranks_end_before_torch_is_loaded(
    override: str, code: int, words: list[str], tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    jsons: dict[str, dict[str, object]] = {
        "JSON_WITH_A_TYPO": {"zero_optimisation": {"stage": 2}},
        "JSON_FOR_A_GPU": {"aio": {"use_gds": True}},
    }
    overrides = [a_json(tmp_path, jsons[override]) if override in jsons else override]
    if "nvme" in override:
        overrides.append("deepspeed=zero3_nvme")
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *overrides)
    # The starter ends with the first rank that fails; the pipe closes when the last rank has ended.
    command = local_command(arguments, RANKS, free_port())
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert all(word in line for word in words), line
    for rank in range(RANKS):
        log = tmp_path / "run" / "logs" / f"rank_{rank:04}.log"
        assert not log.exists() or "loading torch" not in log.read_text()
