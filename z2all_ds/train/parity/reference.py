"""The steps of a run in plain torch: one process, no DeepSpeed, nothing partitioned or overlapped.

This is the specification that every JSON must match, in a form that can be checked by reading: weights in the run's
precision, master weights and gradient sums in fp32, the norm over all gradients, torch's AdamW. In fp32, weights and
master weights are the same.

python -m z2all_ds.train.parity.reference --out FILE --steps N [--config C] [overrides]
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.config.stages import run_stages, stage_at
from z2all_ds.base.errors import EXIT_OK, Z2allError
from z2all_ds.base.parent_watch import follow_owner
from z2all_ds.data import BatchLoader, PackedStream
from z2all_ds.data.run_spec import open_tokenizer, stream_spec
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.model.initialization import initialise_weights, materialise
from z2all_ds.model.recompute import set_recompute
from z2all_ds.ops import Situation, resolve_ops
from z2all_ds.ops.cross_entropy import IGNORED_LABEL
from z2all_ds.ops.dtypes import TORCH_DTYPES
from z2all_ds.ops.visibility import document_borders
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer
from z2all_ds.train.parity.compare import StepValues
from z2all_ds.train.schedules import learning_rate


class PlainTraining:
    """Model, master weights and optimizer of the reference."""

    def __init__(self, run: RunConfig, tokenizer: Z2allTokenizer, device: torch.device) -> None:
        self.run, self.device = run, device
        self.model = build_model(run, tokenizer, device)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.masters = [nn.Parameter(weight.detach().float().clone()) for weight in self.weights]
        self.sums = [torch.zeros_like(master) for master in self.masters]
        matrices = [master for master in self.masters if master.dim() >= 2]
        vectors = [master for master in self.masters if master.dim() < 2]
        decay = run.optimizer.weight_decay
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
            betas=run.optimizer.betas,
            eps=run.optimizer.eps,
            foreach=False,
            fused=False,
        )

    def add_gradients(self, batch: dict[str, Tensor], share: float) -> tuple[float, int]:
        """Add `share` of a micro-batch's gradient; return the sum of its token losses and their number."""
        documents = document_borders(batch["document_ids"]) if self.run.data.document_mask else None
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        outputs = self.model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            document_ids=batch["document_ids"] if self.run.data.document_mask else None,
            cu_seqlens=None if documents is None else documents.to(self.device),
            next_tokens=batch["next_tokens"],
        )
        (outputs.loss * share).backward()
        for weight, total in zip(self.weights, self.sums, strict=True):
            assert weight.grad is not None
            total.add_(weight.grad)
            weight.grad = None
        counted = int((batch["next_tokens"] != IGNORED_LABEL).sum())
        return outputs.losses.double().sum().item(), counted

    def step(self, lr: float) -> float:
        """Take the step and return the norm of all gradients before clipping."""
        # In fp64, as DeepSpeed's ZeRO: summed in fp32 on a CPU, the norm of 32,000 values was off by 3e-6.
        norm = math.sqrt(sum(total.double().square().sum().item() for total in self.sums))
        limit = self.run.train.gradient_clipping
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for master, total in zip(self.masters, self.sums, strict=True):
            master.grad = total.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            for weight, master, total in zip(self.weights, self.masters, self.sums, strict=True):
                weight.copy_(master)
                total.zero_()
        return norm


def build_model(run: RunConfig, tokenizer: Z2allTokenizer, device: torch.device) -> Z2allForCausalLM:
    """Build the model with the run's own ops, since the JSON is tested and not the kernels."""
    precision = run.train.precision
    ops = resolve_ops(run.ops.model_dump(), Situation(device.type, precision, run.model.shape.head_dim))
    with torch.device("meta"):
        model = Z2allForCausalLM(Z2allConfig.from_section(run.model, **tokenizer.model_token_ids), ops)
    materialise(model, device, TORCH_DTYPES[precision])
    initialise_weights(model, run.train.seed)
    set_recompute(model, run.train.activation_checkpointing, run.train.recompute)
    model.train()
    return model


def train_reference(run: RunConfig, steps: int, device: torch.device) -> Iterator[StepValues]:
    """Yield loss and gradient norm of each step, as in `metrics.jsonl`."""
    tokenizer = open_tokenizer(run)
    training = PlainTraining(run, tokenizer, device)
    stages = run_stages(run)
    stream = PackedStream(stream_spec(run), tokenizer, rank=0, world_size=1)
    with BatchLoader(stream, [stage.micro_batch for stage in stages], run.data.num_workers) as batches:
        for step in range(steps):
            stage = stage_at(stages, step)
            training.model.set_rope_theta(stage.rope_theta)
            micro_batches = stage.global_batch // stage.micro_batch
            parts = [training.add_gradients(next(batches), 1 / micro_batches) for _ in range(micro_batches)]
            loss = sum(total for total, _ in parts) / max(1, sum(counted for _, counted in parts))
            lr = learning_rate(step, stages, run.optimizer.lr, run.schedule)
            yield StepValues(step + 1, loss, training.step(lr))


def main(arguments: list[str] | None = None) -> int:
    """Run the process; return the exit code."""
    parser = argparse.ArgumentParser(description="Take the steps of a run in plain torch.")
    parser.add_argument("--config", required=True, help="the resolved run YAML")
    parser.add_argument("--out", required=True, help="file for the losses and gradient norms, as JSON")
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args(arguments)
    follow_owner()
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    try:
        run = load_run_config(options.config)
        values = list(train_reference(run, options.steps, torch.device("cuda" if on_gpu else "cpu")))
    except Z2allError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    write_whole(Path(options.out), json.dumps([vars(value) for value in values]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
