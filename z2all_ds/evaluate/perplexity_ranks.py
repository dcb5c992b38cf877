"""Perplexity in several processes, each with its share of the documents on its own GPU or cores.

They communicate only with the process that started them, through one queue: progress, then sums. A rank that dies ends
all of them, and none outlives the command.
"""

import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from z2all_ds.base.console import Advance
from z2all_ds.base.errors import ConfigError, MachineError, Z2allError
from z2all_ds.base.parent_watch import follow_owner, owner_mark
from z2all_ds.evaluate.loading import load_model
from z2all_ds.evaluate.perplexity_share import Question, RankAnswer, measure_share
from z2all_ds.evaluate.texts import open_texts

LOOK_EVERY_SECONDS = 0.5
PATIENCE_SECONDS = 5.0
"""Time limit for the end of a rank that is done or was terminated."""


def in_ranks(model: str, question: Question, ranks: int, advance: Advance) -> list[RankAnswer]:
    """Return the answers by rank."""
    gpus = torch.cuda.device_count()
    if gpus and ranks > gpus:
        raise ConfigError(f"ranks={ranks}", f"there are {gpus} GPUs, and each rank needs one", "Use fewer ranks.")
    context = multiprocessing.get_context("spawn")
    reports: Any = context.Queue()
    arguments = (model, question, ranks, bool(gpus), owner_mark(), reports)
    processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        answers = _gather(processes, reports, advance)
        for process in processes:
            process.join(PATIENCE_SECONDS)
        return answers
    finally:
        _end(processes)


def _gather(processes: Sequence[BaseProcess], reports: Any, advance: Advance) -> list[RankAnswer]:
    answers: dict[int, RankAnswer] = {}
    while len(answers) < len(processes):
        try:
            rank, report = reports.get(timeout=LOOK_EVERY_SECONDS)
        except queue.Empty:
            for rank, process in enumerate(processes):
                if rank not in answers and process.exitcode is not None and reports.empty():
                    raise MachineError(
                        f"rank {rank}",
                        f"ended without an answer (exit code {process.exitcode})",
                        "If it was killed for lack of memory, use fewer ranks or a smaller --batch.",
                    ) from None
            continue
        if isinstance(report, BaseException):
            raise report
        if isinstance(report, RankAnswer):
            answers[rank] = report
        else:
            advance(report)
    return [answers[rank] for rank in range(len(processes))]


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        if process.pid is not None:
            process.join(PATIENCE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _rank(rank: int, model: str, question: Question, ranks: int, on_gpu: bool, owner: str, reports: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the command ends its ranks
    follow_owner(owner)
    try:
        if not on_gpu:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        loaded = load_model(model, question.dtype, device, quiet=True)
        domains = open_texts(question.data, question.documents)

        def advance(documents: float) -> None:
            if documents:
                reports.put((rank, documents))

        reports.put((rank, measure_share(loaded, domains, question, rank, ranks, advance)))
    except Z2allError as error:  # reported by the command
        reports.put((rank, error))
    except Exception:
        reports.put((rank, RuntimeError(f"in rank {rank}:\n{traceback.format_exc()}")))
