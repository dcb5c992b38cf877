"""Small sealed checkpoints, created without an engine."""

import json
from pathlib import Path
from typing import Any

from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.disk_file import file_checksum, hashing_threads

FILES = {
    "state/rank_00000.safetensors": b"\x00weights" * 100,
    "state/rank_00001.safetensors": b"moments" * 50,
    "rng_rank_0000.pt": b"",
}


def write_temporary(checkpoints: Path, step: int, ranks: int = 2, **trainer: Any) -> Path:
    """Write the files of all ranks to the temporary folder; `trainer` is added to trainer.json, `ranks` are those of
    the state."""
    temporary = layout.temporary_path(checkpoints, step)
    for name, content in FILES.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_bytes(content + str(step).encode())
    (temporary / "state" / "index.json").write_text(json.dumps({"ranks": ranks, "step": step}))
    (temporary / "trainer.json").write_text(json.dumps({"step": step, "dtype": "fp32", **trainer}))
    (temporary / "data_state.json").write_text(json.dumps({"lanes": [step]}))
    return temporary


def seal(checkpoints: Path, step: int) -> Path:
    """Seal the folder of `write_temporary`."""
    temporary = layout.temporary_path(checkpoints, step)
    files = [path for path in temporary.rglob("*") if path.is_file()]
    with hashing_threads() as threads:
        entries = {
            str(path.relative_to(temporary)): {"bytes": path.stat().st_size, "checksum": file_checksum(path, threads)}
            for path in files
        }
    return layout.seal(checkpoints, step, entries)


def make(checkpoints: Path, *steps: int) -> list[Path]:
    sealed = []
    for step in steps:
        write_temporary(checkpoints, step)
        sealed.append(seal(checkpoints, step))
    return sealed


def make_validated(checkpoints: Path, losses: dict[int, float | None]) -> None:
    """Create checkpoints with a validation loss per step; None means not validated."""
    for step, loss in losses.items():
        trainer: dict[str, Any] = {} if loss is None else {"validation_loss": loss}
        write_temporary(checkpoints, step, **trainer)
        seal(checkpoints, step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
