"""The kinds of optimizers: description, size of the state, conditions. Does not load torch.

Bytes are those of the optimizer's own state per parameter of the partition it updates. Not included: with ZeRO stages 1
to 3, each rank updates its shard of the parameters, one flat tensor per group, and also keeps the fp32 master weights
of that shard (4 bytes per parameter; 2 with bf16 master weights) and, during the step, the shard's gradient in the
same dtype (4 or 2).

Some optimizers also allocate tensors of the size of the shard while they step; `step_bytes_per_parameter` is their peak
per parameter of the largest tensor that is updated at once. `z2all bench optimizers` measures both on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from z2all_ds.base.config.sections import OptimizerSection
from z2all_ds.base.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

OFFLOADED_KIND: Final = "ds_cpu_adam"
"""The only kind whose state can be in host memory, and only there."""
ADAMS = frozenset({"adamw", "ds_fused_adam", "ds_cpu_adam", "apex_adam"})
"""They keep the same two moments and step count, so each resumes from the state of another."""
KIND_KEY = "z2all_kind"
"""Key in every parameter group of an optimizer, with its kind as value."""
EIGHT_BIT_BLOCK = 256
"""Values that share an fp32 scale."""


@dataclass(frozen=True)
class OptimizerSituation:
    """The facts that decide whether a kind can run and what it costs."""

    device: str
    """Device of the model: `cpu` or `cuda`."""
    stage: int
    """ZeRO stage. From 1 on, the optimizer gets flat partitions."""
    offload: bool
    """Whether the state is in host memory (`offload_optimizer` in the DeepSpeed JSON)."""
    bf16_master: bool = False
    """Whether the updated weights are bf16 (`bf16.bf16_master_weights_and_grads`), without an fp32 copy."""
    bf16_states: bool = False
    """Whether `bf16.bf16_optimizer_states` is set too."""
    elsewhere: bool = False
    """Plan for another machine: the libraries installed on this one do not matter."""

    @property
    def weight_bytes(self) -> int:
        return 2 if self.bf16_master else 4


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer. The function of the same name in builders.py creates it."""

    name: str
    description: str
    state_bytes_per_parameter: Callable[[OptimizerSituation, OptimizerSection], float]
    known_to_deepspeed: bool = False
    """If False, ZeRO needs `zero_allow_untested_optimizer`."""
    needs_gpu: bool = False
    libraries: tuple[str, ...] = ()
    """Modules of which one must be installed."""
    install: str = "pip install 'z2all_ds[gpu]'"
    step_bytes_per_parameter: Callable[[OptimizerSituation], float] = lambda situation: 0.0

    def why_not(self, situation: OptimizerSituation) -> str | None:
        """Return why the kind cannot run, None if it can."""
        if self.needs_gpu and situation.device != "cuda":
            return f"needs a GPU, the model is on {situation.device}"
        if self.name == OFFLOADED_KIND:
            if not situation.offload:
                return "runs in host memory: needs offload_optimizer in the DeepSpeed JSON, as in zero2_offload"
            if situation.bf16_states:
                return "keeps its moments in fp32: remove bf16.bf16_optimizer_states from the DeepSpeed JSON"
            return None
        if situation.offload:
            return f"the DeepSpeed JSON offloads the state, which only {OFFLOADED_KIND} supports"
        if situation.bf16_master and not situation.bf16_states:
            return "bf16 master weights without offload need bf16.bf16_optimizer_states=true in the DeepSpeed JSON"
        # bitsandbytes supports only GPUs.
        usable = [name for name in self.libraries if name != "bitsandbytes" or situation.device == "cuda"]
        if usable and not situation.elsewhere and not any(map(is_installed, usable)):
            return f"{' and '.join(usable)} not installed; {self.install}"
        return None


@dataclass(frozen=True)
class OptimizerChoice:
    """The selected optimizer, the reason and the size of its state; a row of the table printed at startup."""

    kind: str
    reason: str
    state_bytes_per_parameter: float
    step_bytes_per_parameter: float = 0.0
    """Temporary memory of the step, per parameter of the largest tensor that it updates at once."""


def choose_optimizer(section: OptimizerSection, situation: OptimizerSituation) -> OptimizerChoice:
    """Return the requested kind, or the choice of `auto`; raise if it cannot run here."""
    wanted, reason = section.kind, "requested"
    if wanted == "auto":
        wanted = OFFLOADED_KIND if situation.offload else "adamw"
        reason = "its state is offloaded" if situation.offload else "first choice"
    kind = KINDS[wanted]
    refusal = kind.why_not(situation)
    if refusal:
        able = [name for name, other in KINDS.items() if other.why_not(situation) is None]
        fix = f"Use optimizer.kind= one of {', '.join(able)}." if able else "Change the DeepSpeed JSON."
        raise ConfigError(f"optimizer.kind={section.kind}", refusal, fix)
    if situation.bf16_master and wanted != "adamw_bf16":
        reason += "; updates below 1/256 of a bf16 weight are lost, adamw_bf16 keeps them"
    in_step = kind.step_bytes_per_parameter(situation)
    return OptimizerChoice(wanted, reason, kind.state_bytes_per_parameter(situation, section), in_step)


def build_optimizer(
    choice: OptimizerChoice, groups: list[dict[str, Any]], section: OptimizerSection
) -> "torch.optim.Optimizer":
    """Create the optimizer over the groups."""
    from z2all_ds.zero.optimizers import builders

    builder = getattr(builders, choice.kind)
    optimizer: torch.optim.Optimizer = builder([{**group, KIND_KEY: choice.kind} for group in groups], section)
    return optimizer


def require_same_states(saved: str, here: str) -> None:
    """Refuse to resume from the state of another kind."""
    if saved != here and not {saved, here} <= ADAMS:
        raise CheckpointError(
            f"the checkpoint's optimizer is {saved}",
            f"this run uses {here}, which has an incompatible optimizer state",
            f"Set optimizer.kind={saved}, or export the checkpoint and start a new run.",
        )


def is_installed(module: str) -> bool:
    """Return whether a module exists, without importing it, since it would load torch."""
    package, _, inside = module.partition(".")
    found = find_spec(package)
    folders = [Path(folder) for folder in (found and found.submodule_search_locations) or ()]
    return bool(found) and (not inside or any((folder / inside / "__init__.py").is_file() for folder in folders))


def _bytes(moments: int) -> Callable[[OptimizerSituation, OptimizerSection], float]:
    """Return the size of this many moments in the dtype of the updated weights."""
    return lambda situation, section: float(moments * situation.weight_bytes)


KINDS: dict[str, OptimizerKind] = {
    kind.name: kind
    for kind in (
        OptimizerKind("adamw", "torch's fused AdamW", _bytes(2), known_to_deepspeed=True),
        OptimizerKind(
            "ds_fused_adam",
            "DeepSpeed's CUDA AdamW, compiled once (about 45 s)",
            _bytes(2),
            known_to_deepspeed=True,
            needs_gpu=True,
        ),
        OptimizerKind(
            OFFLOADED_KIND,
            "DeepSpeed's AdamW on the CPU's vector units, for offloaded state; moments in fp32",
            lambda situation, section: 8.0,
            known_to_deepspeed=True,
        ),
        OptimizerKind(
            "apex_adam",
            "NVIDIA apex's fused AdamW",
            _bytes(2),
            known_to_deepspeed=True,
            needs_gpu=True,
            libraries=("apex.optimizers",),
            install="build it from NVIDIA's repository (apex on PyPI is another package)",
        ),
        OptimizerKind(
            "adamw_8bit",
            "AdamW with both moments in 8 bits, from torchao or else bitsandbytes; partitions of fewer than 4096 values"
            " (with torchao also those not a multiple of 256) stay in full precision, 8 bytes",
            lambda situation, section: 2 * (1 + 4 / EIGHT_BIT_BLOCK),
            libraries=("torchao.optim", "bitsandbytes"),
            # torchao's compiled step stores both new moments in fp32, with new scales, between its kernels.
            step_bytes_per_parameter=lambda situation: 2 * (4 + 4 / EIGHT_BIT_BLOCK),
        ),
        OptimizerKind(
            "adamw_bf16",
            "AdamW with both moments in bf16, stochastically rounded; bf16 weights according to optimizer.rounding",
            lambda situation, section: 6.0 if situation.bf16_master and section.rounding == "kahan" else 4.0,
        ),
        OptimizerKind(
            "lion",
            "sign of the momentum: one moment; needs a learning rate 3-10 times smaller and a decay as much larger",
            _bytes(1),
        ),
        OptimizerKind(
            "adafactor",
            "torch's Adafactor; updates are lr times the scale of the weights, so use an lr near 0.01. ZeRO passes flat"
            " partitions, which cannot be factored: a full second moment, no first, and scales are those of the"
            " partition, so losses depend on the number of ranks. Only stage 0 keeps just rows and columns",
            # At stage 0 rows and columns of each matrix, which are negligible.
            lambda situation, section: float(situation.weight_bytes) if situation.stage else 0.0,
            # The squared gradient and the update.
            step_bytes_per_parameter=lambda situation: 2.0 * situation.weight_bytes,
        ),
    )
}
