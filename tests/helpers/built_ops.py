"""What torch leaves where it has built an op, without the minute that a build takes."""

from importlib.util import find_spec
from pathlib import Path


def own_deepspeed() -> Path:
    found = find_spec("deepspeed")
    assert found and found.origin
    return Path(found.origin).parent


def pretend_built(extensions: Path, op: str, deepspeed: Path | None = None) -> Path:
    """The op's folder; built from the sources of this DeepSpeed, or another."""
    folder = extensions / op
    folder.mkdir(exist_ok=True)
    source = (deepspeed or own_deepspeed()) / "ops" / "csrc" / f"{op}.cpp"
    (folder / "build.ninja").write_text(f"build {op}.o: compile {source}\n")
    (folder / f"{op}.so").touch()
    return folder
