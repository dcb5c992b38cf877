"""Small valid inputs of every kind that the verbs read, made once and copied for each case."""

import bz2
import gzip
import io
import json
import shutil
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
import zstandard

from tests.helpers.checkpoints import write_run
from tests.helpers.llama_folders import make_llama
from tests.helpers.memorised import TASKS
from tests.helpers.models import TINY
from tests.helpers.probe_files import write_probes
from z2all_ds.base.config import load_run_config
from z2all_ds.checkpoint.disk_file import file_checksum, hashing_threads
from z2all_ds.corpus import SourceSpec, build_corpus
from z2all_ds.data.data_plan import DataPlan
from z2all_ds.data.run_spec import open_tokenizer, stream_spec
from z2all_ds.data.tokens.tokenizing import tokenize_corpus
from z2all_ds.tokenizer import train_tokenizer
from z2all_ds.tokenizer.spm import MODEL_FILE

SOURCES = (
    SourceSpec("en", "python_docstrings", max_bytes=30_000),
    SourceSpec("zh", "chinese_sample", max_bytes=30_000),
)
CONFIG = {
    "run_dir": "out_run",
    "deepspeed": "ds.json",
    "model": TINY.model_dump(mode="json"),
    "data": {"corpus": "corpus", "tokenizer": "tokenizer", "weights": {"en": 1, "zh": 2}},
    "train": {"steps": 4, "sequence_length": 32, "global_batch": 4, "micro_batch": 2},
    "stages": [{"name": "first", "steps": 2}, {"name": "last", "weights": {"zh": 1}}],
    "probes": {"file": "probes.yaml", "every_steps": 2},
    "validation": {"corpus": "corpus", "samples": 4, "every_steps": 2},
}
DS_JSON = {"zero_optimization": {"stage": 1, "overlap_comm": False}, "zero_allow_untested_optimizer": True}
HOSTS_YAML = """\
all: {slots: 1, ssh: {user: me, port: 2222}, environment: {A: "1"}}
nodes:
  node1: {inside: {address: 10.0.0.1}}
  node2: {slots: 1, interface: eth0}
"""
MEASURED = {
    "findings": [],
    "places": [],
    "pairs": [{"from": "a", "to": "b", "latency_us": 50.0, "gigabits_out": 10.0, "gigabits_in": 9.0}],
    "health": {"turns": [{"gather_gbps": 1.5}]},
}


def make_inputs(root: Path) -> None:
    """Write all inputs below `root`; the names are those in `verbs.py`."""
    write_raw(root / "raw")
    build_corpus(root / "corpus", SOURCES, max_shard_bytes=20_000)
    train_tokenizer(root / "corpus", root / "tokenizer", 400)
    tokenize_corpus(root / "corpus", root / "tokenizer", root / "tokens", workers=1)
    train_tokenizer(root / "raw" / "plain.txt", root / "spm", 280, algorithm="spm")
    shutil.copy2(root / "spm" / MODEL_FILE, root / "spm.model")
    make_llama(root / "llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(root / "tokenizer" / file, root / "llama" / file)
    run = write_run(root / "run", TINY, Path("corpus"), Path("tokenizer"), 3, 7)
    run.config.write_text(run.config.read_text().replace(str(root / "run"), "run"))
    for step in (3, 7):
        write_data_state(root, run.checkpoints / f"step_{step:08d}", step)
    write_records(root / "run")
    write_deepspeed(root / "saved")
    write_probes(root).rename(root / "probes.yaml")
    shutil.copytree(TASKS, root / "tasks")
    (root / "run.yaml").write_text(yaml.safe_dump(CONFIG, allow_unicode=True))
    (root / "ds.json").write_text(json.dumps(DS_JSON))
    (root / "hosts.yaml").write_text(HOSTS_YAML)
    (root / "hosts.txt").write_text("# two\nnode1 slots=1\nnode2 slots=1\n")
    (root / "measured.json").write_text(json.dumps(MEASURED))
    (root / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "二", "id": 2}\n')
    (root / "plugin.py").write_text("from z2all_ds.corpus.converters import source\n")


def write_raw(folder: Path) -> None:
    """Write the same rows in every form that `corpus convert` reads."""
    rows: list[dict[str, Any]] = [
        {"id": number, "title": f"标题 {number}", "content": f"Text {number}, 中文。\n" * 5} for number in range(20)
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(lines)
    (folder / "rows.json").write_bytes(json.dumps(rows, indent=1).encode())
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "rows.jsonl.bz2").write_bytes(bz2.compress(lines))
    (folder / "rows.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "plain.txt").write_text("\n\n".join(row["content"] for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    with zipfile.ZipFile(folder / "rows.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/rows.jsonl", lines)
    with tarfile.open(folder / "rows.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("rows.jsonl")
        member.size = len(lines)
        archive.addfile(member, io.BytesIO(lines))
    (folder.parent / "adoptable").mkdir()
    for name in ("rows.jsonl", "rows.parquet"):
        shutil.copy2(folder / name, folder.parent / "adoptable" / name)


def write_data_state(root: Path, checkpoint: Path, step: int) -> None:
    """Write the data state that a run of eight samples per step has at this step."""
    overrides = [f"data.corpus={root / 'corpus'}", f"data.tokenizer={root / 'tokenizer'}"]
    run = load_run_config(str(root / "run" / "run.yaml"), overrides)
    plan = DataPlan.open(stream_spec(run), open_tokenizer(run))
    state = plan.state_at(step * run.train.global_batch, plan.fresh_lanes(range(run.num_lanes)))
    (checkpoint / "data_state.json").write_text(json.dumps(state))
    index = json.loads((checkpoint / "state" / "index.json").read_text())
    (checkpoint / "state" / "index.json").write_text(json.dumps({**index, "ranks": 2, "optimizer": "adamw"}))
    reseal(root)


def reseal(root: Path) -> None:
    """Make the manifests of all checkpoints below `root` agree with their files again, as far as they are readable."""
    for manifest in root.glob("*/checkpoints/*/MANIFEST.json"):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(manifest.read_text())
            with hashing_threads() as threads:
                for name, entry in content["files"].items():
                    file = manifest.parent / name
                    entry |= {"bytes": file.stat().st_size, "checksum": file_checksum(file, threads)}
            manifest.write_text(json.dumps(content))


def write_records(run: Path) -> None:
    """Write metrics, events and health of a run of eight steps."""
    steps = [
        {"step": n, "loss": 5 - n / 10, "loss_of_en": 5.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_seen": n * 256,
         "time_unix": 1e9 + n, "seconds": 1.0, "samples": n * 8, "shares": {"en": 0.5, "zh": 0.5}}
        for n in range(1, 9)
    ]  # fmt: skip
    events = [
        {"event": "start", "step": 0, "time_unix": 1e9, "steps": 8},
        {"event": "checkpoint", "step": 7, "time_unix": 1e9 + 7},
        {"event": "done", "step": 8, "time_unix": 1e9 + 8, "outcome": "done"},
    ]
    for name, records in (("metrics", steps), ("events", events), ("health", [{"step": 8, "ranks": [[1.0, 2.0]]}])):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "environment.json").write_text(json.dumps({"versions": {"torch": "2"}, "device": "cpu"}))
    shutil.copy2(run / "run.yaml", run / "ds_config.json")
    (run / "ds_config.json").write_text(json.dumps(DS_JSON))


def write_deepspeed(folder: Path) -> None:
    """Write a folder as DeepSpeed does with ZeRO 0 in fp32."""
    from z2all_ds.model import Z2allConfig, Z2allForCausalLM

    module = Z2allForCausalLM(Z2allConfig.from_section(TINY)).state_dict()
    names = list(module)
    state = {n: {"step": 3.0, "exp_avg": module[k] * 0, "exp_avg_sq": module[k] * 0} for n, k in enumerate(names)}
    group = {"params": list(range(len(names))), "betas": (0.9, 0.95), "lr": 1e-3}
    content = {
        "module": module, "param_shapes": None, "buffer_names": [], "mp_world_size": 1,
        "optimizer": {"state": state, "param_groups": [group]},
        "global_steps": 3, "global_samples": 24, "skipped_steps": 0, "ds_config": dict(DS_JSON),
    }  # fmt: skip
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    torch.save(content, folder / "global_step3" / "mp_rank_00_model_states.pt")
