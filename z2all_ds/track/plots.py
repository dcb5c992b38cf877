"""Curves as PNG or SVG, from metrics.jsonl alone."""

from pathlib import Path

from z2all_ds.atomic import make_folder
from z2all_ds.errors import ConfigError, DataError
from z2all_ds.run_folder import RunFolder
from z2all_ds.track.writer import read_records

LOSS_PREFIX = "loss_of_"
"""metrics.jsonl holds the loss of domain X under loss_of_X."""


def plot_loss(run_dirs: list[Path], out: Path) -> Path:
    """Loss over steps, total and per domain, of one run or several side by side. Returns the file's path."""
    if out.suffix not in (".png", ".svg"):
        raise ConfigError(f"--out {out}", "must end in .png or .svg", "Give such a name.")
    # Not pyplot, which would look for a screen and keep the figure until somebody closes it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.subplots()
    for run_dir in run_dirs:
        records = list(read_records(RunFolder(run_dir).metrics))
        if not records:
            raise DataError(
                f"{run_dir}", "no metrics.jsonl with a step in it", "Give the folder of a run that has trained."
            )
        label = f"{run_dir.name}: " if len(run_dirs) > 1 else ""
        axes.plot([r["step"] for r in records], [r["loss"] for r in records], linewidth=2, label=_plain(f"{label}all"))
        domains = sorted({key for record in records for key in record if key.startswith(LOSS_PREFIX)})
        for key in domains:
            points = [(r["step"], r[key]) for r in records if key in r]
            name = _plain(label + key.removeprefix(LOSS_PREFIX))
            axes.plot(*zip(*points, strict=True), linewidth=1, alpha=0.8, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    make_folder(out.parent)
    figure.savefig(out)
    return out


def _plain(name: str) -> str:
    """A name as it is: matplotlib reads what stands between dollars as a formula, and hides names that begin with _."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name
