"""The files that torch writes when it builds an op, without the build itself, which takes a minute."""

from importlib.util import find_spec
from pathlib import Path


def own_deepspeed() -> Path:
    found = find_spec("deepspeed")
    assert found and found.origin
    return Path(found.origin).parent


def pretend_built(extensions: Path, op: str, deepspeed: Path | None = None) -> Path:
    """Write the folder of an op as if built from the sources of this or another DeepSpeed, and return it."""
    folder = extensions / op
    folder.mkdir(exist_ok=True)
    source = (deepspeed or own_deepspeed()) / "ops" / "csrc" / f"{op}.cpp"
    (folder / "build.ninja").write_text(f"build {op}.o: compile {source}\n")
    (folder / f"{op}.so").touch()
    return folder
