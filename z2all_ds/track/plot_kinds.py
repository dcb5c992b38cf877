"""Kinds of plots, the fields of metrics.jsonl they show, and the options of a plot."""

from dataclasses import dataclass

from z2all_ds.base.errors import ConfigError
from z2all_ds.track.fields import LOSS_PREFIX, PROBE_PREFIX, TOKENS_PREFIX

TIME_PARTS = ("forward", "backward", "optimizer", "data_wait", "validation", "checkpoint", "other")
"""They add up to the step; communication is included in the first three."""
PROBE_LABELS = {
    "completion": "probability",
    "format": "probability",
    "sentence": "perplexity per token",
    "compare": "margin (nats)",
}
"""Axis of each kind of probe."""
LOG_PROBES = ("probability", "perplexity per token")
"""Axes that span powers of ten while a model learns."""
ALL = "all"


@dataclass(frozen=True)
class PlotOptions:
    """Options of `z2all plot`."""

    what: str = "loss"
    """Comma-separated kinds, or `all`."""
    x: str = "step"
    log: bool = False
    smooth: float = 0.0
    """Weight of the past in the moving average."""
    events: bool = True
    title: str = ""
    width: float | None = None
    """In inches, as is the height; None: by the number of panels."""
    height: float | None = None
    dpi: int = 120
    file_format: str = "png"
    """Format of the files if the output is a folder."""


@dataclass(frozen=True)
class Kind:
    """The curves of one panel."""

    y_label: str
    keys: tuple[str, ...] = ()
    prefix: str | None = None
    """Each field with this prefix is a curve: one per domain or probe."""
    factor: float = 1.0
    """From the record's unit to the label's."""
    is_sparse: bool = False
    """Measured once in many steps, so the points are drawn."""
    is_smoothed: bool = False
    """`--smooth` applies to it."""
    per_run: bool = False
    """Each run has its own panel."""

    def has(self, key: str) -> bool:
        return key in self.keys or bool(self.prefix and key.startswith(self.prefix))

    def label(self, key: str) -> str:
        """Return the name of a curve in the legend."""
        if key in LABELS:
            return LABELS[key]
        if self.prefix and key.startswith(self.prefix):
            return key.removeprefix(self.prefix)
        return key.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")


LABELS = {
    "loss": "all",
    "validation_loss": "all",
    "mfu": "MFU",
    "mfu_exact": "MFU, exact count",
    "hfu": "HFU",
    "memory_bytes": "allocated",
    "peak_memory_bytes": "peak allocated",
    "reserved_memory_bytes": "reserved",
    "host_memory_bytes": "main memory",
}
KINDS = {
    "loss": Kind("loss (nats per token)", ("loss",), LOSS_PREFIX, is_smoothed=True),
    "validation": Kind(
        "validation loss (nats per token)", ("validation_loss",), f"validation_{LOSS_PREFIX}", is_sparse=True
    ),
    "lr": Kind("learning rate", ("lr",)),
    "grad_norm": Kind("gradient norm", ("grad_norm",), is_smoothed=True),
    "speed": Kind("tokens per second", ("tokens_per_second",), is_smoothed=True),
    "mfu": Kind("utilisation (%)", ("mfu", "mfu_exact", "hfu"), factor=100.0, is_smoothed=True),
    "time": Kind(
        "seconds per step",
        (*(f"{part}_seconds" for part in TIME_PARTS), "communication_seconds"),
        is_smoothed=True,
        per_run=True,
    ),
    "memory": Kind(
        "memory (GiB)",
        ("memory_bytes", "peak_memory_bytes", "reserved_memory_bytes", "host_memory_bytes"),
        factor=2.0**-30,
    ),
    "mixture": Kind("share of tokens (%)", (), TOKENS_PREFIX, factor=100.0, per_run=True),
    "probes": Kind("probe", (), PROBE_PREFIX, is_sparse=True),
}


def chosen_kinds(what: str) -> list[str]:
    """Parse a comma-separated list of kinds; `all` stands for every kind."""
    names = list(dict.fromkeys(name.strip() for name in what.split(",") if name.strip()))
    unknown = [name for name in names if name not in (*KINDS, ALL)]
    if unknown or not names:
        wrong = ", ".join(unknown) or "(empty)"
        raise ConfigError(f"--what {wrong}", "unknown kind", f"Known: {', '.join([*KINDS, ALL])}.")
    return list(KINDS) if ALL in names else names
