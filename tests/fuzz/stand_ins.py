"""Replaces what a case must not do in this process: start ranks, compilers or other processes, serve, use ssh, or
measure."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import datasets

from z2all_ds.cluster.doctor import examine_run
from z2all_ds.corpus import executors
from z2all_ds.export.verify import WHOLE, Verdict
from z2all_ds.tokenizer.bbpe import DEFAULT_SPLIT
from z2all_ds.tokenizer.learning_process import TextReader, learn
from z2all_ds.tokenizer.sampling import open_sources
from z2all_ds.track.board.remote import parse_remote
from z2all_ds.track.board.run import WatchedRun
from z2all_ds.track.files import Files

WORKER_PROCESSES = executors._worker_processes


def started(*_: Any, **__: Any) -> Any:
    raise SystemExit(0)


def learned(
    algorithm: str, inputs: Sequence[str], shares: Mapping[str, int], text_vocab_size: int, split: str = DEFAULT_SPLIT
) -> tuple[dict[str, bytes], int]:
    reader = TextReader(open_sources(list(inputs), with_fingerprint=False), shares)
    return learn(algorithm, reader, text_vocab_size, split), reader.text_bytes


def read_once(runs: Sequence[str], *_: Any) -> None:
    """Do what the board does with a run of this machine, without threads and sockets."""
    for folder in runs:
        if parse_remote(folder) is not None:
            continue
        run = WatchedRun(0, Files(), folder, folder)
        with suppress(OSError):  # shown on the page
            while run.update():
                pass
        run.summary("run")
        run.shown_events()
        run.shown_health()
        run.mixture()
        run.probes()
        run.points(["loss"], "time", None, None, 100)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Replace them within the block."""
    replaced = {
        "z2all_ds.train.command.run_local_ranks": started,
        "z2all_ds.train.command.prebuild": lambda *_: None,
        "z2all_ds.train.parity.command.run_group": started,
        "z2all_ds.quickstart.walk.build_corpus": started,
        "z2all_ds.cluster.doctor.examine": lambda _: [],
        "z2all_ds.cluster.doctor.examine_further": lambda _, run: examine_run(run) if run else [],
        "z2all_ds.cluster.preflight.command.preflight": started,
        "z2all_ds.cluster.overlay.command.agents_on": started,
        "z2all_ds.cluster.launch.multi_node.supervise": started,
        "z2all_ds.cluster.launch.multi_node.preflight": started,
        "z2all_ds.export.to_hf.compare_with_folder": lambda *_, **__: Verdict(0.0, 1, {}, WHOLE),
        "z2all_ds.tokenizer.train.learn_in_own_process": learned,
        "z2all_ds.track.board.serve.serve": read_once,
        "z2all_ds.bench.in_ranks.run_group": started,
        "z2all_ds.bench.step.measure_row": started,
        "z2all_ds.bench.gpu_memory.gpu_count": lambda: 1,
        "z2all_ds.bench.gpu_memory.measure": started,
        "z2all_ds.bench.ops.measure_backend": started,
        "z2all_ds.bench.floor.Attention": started,
        "z2all_ds.bench.shapes.measure_in_passes": started,
        "z2all_ds.bench.tokenizer.in_new_process": started,
        "z2all_ds.bench.data.SEQUENCE_LENGTH": 32,  # the inputs are short
        "z2all_ds.bench.data.Runner": started,
        "z2all_ds.corpus.executors._worker_processes": lambda _: WORKER_PROCESSES(1),
        "z2all_ds.base.storage.folders.FIRST_WAIT_SECONDS": 0.0,
        "z2all_ds.base.run_folder.LOCK_PATIENCE_SECONDS": 0.5,
    }
    from lm_eval.tasks import TaskManager  # not on every machine that collects the tests

    def without_defaults(**settings: Any) -> Any:
        return TaskManager(**{**settings, "include_defaults": False})

    with tempfile.TemporaryDirectory() as cache:
        patches = [patch(name, value) for name, value in replaced.items()]
        # A wrong name of a task is sought in the harness's own 10,000 files, which takes half a minute.
        patches.append(patch("lm_eval.tasks.TaskManager", without_defaults))
        patches.append(patch.object(datasets.config, "HF_DATASETS_CACHE", cache))
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()
