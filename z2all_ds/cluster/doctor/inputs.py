"""Inputs of a run config: tokenizer, corpus and shards, DeepSpeed JSON. A check raises the error of the run."""

from pathlib import Path
from typing import TYPE_CHECKING

from z2all_ds.base import machine
from z2all_ds.base.errors import DataError
from z2all_ds.base.vocabulary_rows import rounded_rows
from z2all_ds.cluster.doctor.findings import OK, WARN, Finding

if TYPE_CHECKING:
    from z2all_ds.base.config import RunConfig
    from z2all_ds.base.storage import Folder

WASTED_SHARE = 0.05
"""Unused rows of a vocabulary; rounding up explains less."""


def tokenizer(run: "RunConfig") -> Finding:
    from z2all_ds.data.run_spec import open_tokenizer

    size, rows = open_tokenizer(run).size, run.model.vocab_size
    value = f"{size:,} ids for model.vocab_size={rows:,}"
    if rows - size > WASTED_SHARE * rows:
        fix = f"Set model.vocab_size={rounded_rows(size)}: {rows - size:,} rows of embedding and head are unused."
        return Finding("tokenizer", WARN, value, fix)
    return Finding("tokenizer", OK, value)


def corpus(run: "RunConfig") -> Finding:
    from z2all_ds.train.inputs import check_data
    from z2all_ds.zero.first_weights import is_new_run

    ranks = machine.gpu_count() or 1
    check_data(run, ranks, is_new_run(run, "auto"))
    return Finding("data", OK, f"{run.data.corpus} serves {ranks} rank{'s' if ranks > 1 else ''}")


def shards(run: "RunConfig") -> list[Finding]:
    """Check the shards of training and held-out data; a run would notice a bad one only when it reads it."""
    return [shards_of(name) for name in dict.fromkeys((run.data.corpus, run.validation.corpus)) if name]


def shards_of(name: str) -> Finding:
    """Check that each shard exists with the size in the manifest; read only the last bytes of Parquet files."""
    from z2all_ds.base.storage import open_folder
    from z2all_ds.data.run_spec import corpus_location

    location = corpus_location(name)
    folder = open_folder(location)
    if not folder.is_local:
        return Finding("shards", OK, f"{name} is not checked: each shard would need a request")
    files, fix = _files_of(location)
    bad = [(file, problem) for file, size in files.items() if (problem := _problem(folder, file, size))]
    if bad:
        file, problem = bad[0]
        others = f"; {len(bad) - 1} more of {len(files)} files are damaged" if bad[1:] else ""
        raise DataError(folder.where(file), f"{problem}{others}", fix)
    return Finding("shards", OK, f"{name}: all {len(files)} files exist with the sizes in the manifest")


def _files_of(location: str | Path) -> tuple[dict[str, int | None], str]:
    """Return name -> size of all files of a corpus (None for Parquet: unknown), and the fix for a damaged one."""
    from z2all_ds.corpus.manifest import load_manifest
    from z2all_ds.data.tokens.manifest import ENDS_DTYPE, TOKEN_DTYPES
    from z2all_ds.data.tokens.reading import is_token_corpus, load_token_manifest

    if is_token_corpus(location):
        tokens = load_token_manifest(location)
        width, files = TOKEN_DTYPES[tokens.dtype].itemsize, dict[str, int | None]()
        for shard in tokens.shards:
            files[shard.tokens_file] = shard.tokens * width
            for name in filter(None, (shard.ends_file, shard.sizes_file)):
                files[name] = shard.documents * ENDS_DTYPE.itemsize
        return files, "Restore it, or remove it and run `z2all corpus tokenize` again: it writes what is missing."
    manifest = load_manifest(location)
    fix = f"Restore it, or build the corpus again; `z2all corpus audit {location}` reads every shard."
    if not manifest.holds_records:
        fix = "Restore it, or run `z2all corpus adopt` again on the files that are there."
    parquet = {shard.path for shard in manifest.shards if shard.path.lower().endswith(".parquet")}
    return {shard.path: None if shard.path in parquet else shard.bytes for shard in manifest.shards}, fix


def _problem(folder: "Folder", file: str, size: int | None) -> str:
    """Return the problem of a file; empty if there is none."""
    from z2all_ds.base.storage import reason

    try:
        found = folder.stamp(file).size
        # The manifest of adopted Parquet has the size of its texts, but every complete file ends with these bytes.
        is_cut = size is None and folder.read_range(file, max(0, found - 4), found) != b"PAR1"
    except OSError as error:
        return f"the shard cannot be read ({reason(error)})"
    if size not in (None, found):
        return f"the shard has {found:,} bytes, but the manifest says {size:,}"
    return "the shard is truncated: it has no Parquet footer" if is_cut else ""


def deepspeed_json(run: "RunConfig") -> Finding:
    from z2all_ds.zero.ds_config import resolve
    from z2all_ds.zero.offload_disk import require_libaio
    from z2all_ds.zero.op_builds import needed_ops

    resolved = resolve(run, machine.gpu_count() or 1, machine.device_type())
    if "async_io" in needed_ops(resolved, machine.device_type()):
        require_libaio()
    return Finding("DeepSpeed JSON", OK, f"{resolved.name}: ZeRO-{resolved.stage}, {resolved.dtypes}")


CHECKS = (tokenizer, corpus, shards, deepspeed_json)
