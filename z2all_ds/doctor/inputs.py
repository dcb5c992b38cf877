"""What a run config names: the corpus and its shards, the tokenizer, the DeepSpeed JSON."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from z2all_ds import machine
from z2all_ds.doctor.findings import OK, WARN, Finding

if TYPE_CHECKING:
    from z2all_ds.config import RunConfig

WASTED_SHARE = 0.05
"""Of a vocabulary's rows: more than rounding up explains."""


def checks(run: "RunConfig") -> list[Callable[[], list[Finding]]]:
    """Each raises what a run would raise."""
    return [lambda: tokenizer(run), lambda: corpus(run), lambda: deepspeed_json(run)]


def tokenizer(run: "RunConfig") -> list[Finding]:
    from z2all_ds.train.inputs import open_tokenizer

    size, rows = open_tokenizer(run).size, run.model.vocab_size
    told = f"{size:,} ids for model.vocab_size={rows:,}"
    if rows - size > WASTED_SHARE * rows:
        fix = f"Set model.vocab_size={-(-size // 64) * 64}: {rows - size:,} rows of table and head would never be used."
        return [Finding("tokenizer", WARN, told, fix)]
    return [Finding("tokenizer", OK, told)]


def corpus(run: "RunConfig") -> list[Finding]:
    from z2all_ds.train.inputs import check_data

    ranks = machine.gpu_count() or 1
    check_data(run, ranks)
    return [Finding("data", OK, f"{run.data.corpus} serves {ranks} ranks; `z2all corpus audit` reads all of it")]


def deepspeed_json(run: "RunConfig") -> list[Finding]:
    from z2all_ds.train.ds_config import resolve

    resolved = resolve(run, machine.gpu_count() or 1, machine.device_type())
    return [Finding("DeepSpeed JSON", OK, f"{resolved.name}: ZeRO-{resolved.stage}, {resolved.dtypes}")]
