"""Run folders for tests of the board, like those of training: Chinese domains, a spike, stages, ranks on two nodes."""

import json
import math
import random
from pathlib import Path
from typing import Any

DOMAINS = ("中文网页", "英文", "code")
START_UNIX = 1_794_789_000.0
HOSTS = ("node-a", "node-a", "node-b", "node-b")
SLOW_RANK = 2
PROBES = [
    {"name": "首都", "kind": "completion", "at_least": 0.1, "at_most": None, "from_step": 0},
    {"name": "news", "kind": "sentence", "at_least": None, "at_most": 60.0, "from_step": 0},
    {"name": "语序", "kind": "compare", "at_least": 0.0, "at_most": None, "from_step": 250},
]
"""The probes that a run describes when it starts; the metrics also contain `old`, which it does not describe."""


def metric(step: int, domains: tuple[str, ...] = DOMAINS, seed: int = 0) -> dict[str, Any]:
    """Return the record of one step, which depends only on the arguments."""
    noise = random.Random(seed * 1_000_003 + step)
    loss = 2.5 + 7 * math.exp(-step / 60) + noise.gauss(0, 0.05)
    record: dict[str, Any] = {"step": step, "tokens_seen": 65536 * step, "loss": loss}
    record["grad_norm"] = 0.5 + math.exp(-step / 40) + 0.05 * noise.random()
    for place, domain in enumerate(domains):
        record[f"loss_of_{domain}"] = loss + 0.3 * (place - 1)
        record[f"tokens_of_{domain}"] = 20_000 + 1_000 * place
    record |= {"lr": 3e-4 * min(1.0, step / 100), "step_taken": True, "step_seconds": 1.0}
    parts = {"data_wait": 0.02, "forward": 0.3, "backward": 0.5, "optimizer": 0.1, "communication": 0.15}
    parts |= {"checkpoint": 0.4 if step % 100 == 0 else 0.0, "validation": 0.0, "other": 0.03}
    record |= {f"{name}_seconds": seconds for name, seconds in parts.items()}
    record |= {"tokens_per_second": 65536 + 500 * noise.random(), "mfu": 0.42 + 0.01 * noise.random()}
    record |= {"memory_bytes": 40 << 30, "peak_memory_bytes": 52 << 30, "reserved_memory_bytes": 60 << 30}
    record |= {"host_memory_bytes": 9 << 30, "data_position": 32 * step, "time_unix": START_UNIX + step}
    if step % 50 == 0:
        for name in ("", *(f"_of_{domain}" for domain in domains)):
            record[f"validation_loss{name}"] = loss + 0.1
            record[f"validation_perplexity{name}"] = math.exp(loss + 0.1)
        record |= {"probe_首都": min(0.9, step / 500), "probe_news": 90 + 1e4 / step}
        record |= {"probe_语序": -0.5 + step / 400, "probe_old": 7.0}
    return record


def write_run(
    folder: Path,
    steps: int,
    *,
    of_steps: int = 1000,
    domains: tuple[str, ...] = DOMAINS,
    seed: int = 0,
    lr: float = 3e-4,
    hosts: tuple[str, ...] = HOSTS,
) -> Path:
    folder.mkdir(parents=True)
    shares = {domain: 1 / len(domains) for domain in domains}
    append(folder / "metrics.jsonl", [metric(step, domains, seed) for step in range(1, steps + 1)])
    mixture = [
        {"name": "first", "first_step": 0, "shares": shares},
        {"name": "退火", "first_step": 120, "shares": shares},
    ]
    started = {"world_size": len(hosts), "zero_stage": 1, "dtype": "bf16", "deepspeed": "zero1", "steps": of_steps}
    documents = [{"sample": 41, "domain": domains[0], "shard": "shard_00001.jsonl.gz", "record": 7}]
    spike = {
        "policy": "rollback",
        "taken": False,
        "values": {"loss": 9.9},
        "outliers": ["loss"],
        "limits": {"loss": 4.0},
    }
    append(
        folder / "events.jsonl",
        [
            event("started", 0, **started, hosts=list(hosts), mixture=mixture, probes=PROBES),
            event("checkpoint", 100, path="step_00000100", write_seconds=0.4),
            event("stage", 120, name="退火", sequence_length=4096),
            event("spike", 150, **spike, samples=[4800, 4832], documents=documents),
            event("rolled_back", 100, from_step=150, skipped_samples=[4800, 4832]),
        ],
    )
    append(folder / "health.jsonl", [health(step, len(hosts)) for step in range(10, steps + 1, 10)])
    config = f"model:\n  preset: tiny\noptimizer:\n  lr: {lr}\ntrain:\n  steps: {of_steps}\n"
    (folder / "run.yaml").write_text(config, encoding="utf-8")
    return folder


def event(kind: str, step: int, **details: Any) -> dict[str, Any]:
    return {"time_unix": START_UNIX + step, "event": kind, "step": step, **details}


def health(step: int, ranks: int = len(HOSTS)) -> dict[str, Any]:
    work = [1.4 if rank == SLOW_RANK else 0.9 for rank in range(ranks)]
    others = {"data_wait_seconds": [0.01] * ranks, "memory_bytes": [40 << 30] * ranks}
    return {"step": step, "time_unix": START_UNIX + step, "work_seconds": work, **others}


def append(file: Path, records: list[dict[str, Any]]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
