"""The sections of the run config: every setting with its type, default and help text, and the checks within a section.

Plain data: this module uses no disk, network or torch.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from z2all_ds.base.accounting import ModelShape
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.rope_scaling import check_rope_scaling


class Section(BaseModel):
    """Base class: unknown keys fail, values are immutable, and docstrings under fields are their help texts."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model's shape, with the key names of Llama configs."""

    vocab_size: int = Field(64320, gt=0, lt=2**31)
    """Rows of the embedding; at least the number of tokenizer ids, padded to a multiple of 64 for speed. auto: the rows
    of the train.init_from folder, or the ids of data.tokenizer rounded up to a multiple of 64."""
    hidden_size: int = Field(2048, gt=0, lt=2**31)
    """Width of the residual stream."""
    intermediate_size: int = Field(5632, gt=0, lt=2**31)
    """Width inside the SwiGLU feed-forward, near 8/3 of hidden_size."""
    num_hidden_layers: int = Field(22, gt=0, le=2_000)
    """Number of decoder layers."""
    num_attention_heads: int = Field(32, gt=0, lt=2**31)
    """Number of query heads; must divide hidden_size."""
    num_key_value_heads: int = Field(8, gt=0, lt=2**31)
    """Number of key/value heads (grouped-query attention); must divide num_attention_heads."""
    max_position_embeddings: int = Field(2048, gt=0, lt=2**31)
    """Longest sequence the model supports."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Extends positions beyond the trained length: rope_type (linear, dynamic, yarn or llama3) and its own fields."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square inside RMSNorm."""
    initializer_range: float = Field(0.02, gt=0, le=1)
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output head."""
    attention_bias: bool = False
    """Add biases to q, k, v and the attention output projection."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout rate of the attention weights."""
    dropout1: float = Field(0.0, ge=0, lt=1)
    """Dropout rate of the attention output, before the residual sum."""
    dropout2: float = Field(0.0, ge=0, lt=1)
    """Dropout rate of the feed-forward output, before the residual sum."""
    residual_in_fp32: bool = False
    """Keep the residual stream in fp32 when the layers compute in 16 bits: less rounding, more memory traffic."""

    @field_validator("rope_scaling")
    @classmethod
    def _scaling_is_known(cls, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if scaling is None else check_rope_scaling(scaling, "model.rope_scaling")

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelSection":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must divide hidden_size={self.hidden_size}"
            )
        if (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                f"head size {self.hidden_size // self.num_attention_heads} (hidden_size / num_attention_heads)"
                " must be even for rotary positions"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide"
                f" num_attention_heads={self.num_attention_heads}"
            )
        return self

    @property
    def shape(self) -> ModelShape:
        """Return the shape used for counting parameters and FLOPs."""
        return ModelShape(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            tie_embeddings=self.tie_word_embeddings,
            attention_bias=self.attention_bias,
        )


class OpsSection(Section):
    """Which implementation of each op runs; `auto` is resolved once at startup, printed and recorded."""

    attention: Literal["auto", "packed", "sdpa", "cudnn", "flash", "varlen", "flash_attn", "flex", "eager"] = "auto"
    """packed: the fastest per case: flash_attn or varlen for packed documents, else sdpa. sdpa: torch's fused
    attention with its own choice of kernel. cudnn, flash: this torch kernel, for one document per sequence. varlen:
    torch's kernel for packed documents. flash_attn: the library of that name, packed documents included. flex: torch's
    FlexAttention, compiled. eager: the plain formula, the reference."""
    rope: Literal["auto", "triton", "liger", "flash_attn", "torch"] = "auto"
    """triton: this package's kernel. liger, flash_attn: that library's kernel. torch: the reference."""
    rms_norm: Literal["auto", "triton", "liger", "apex", "torch"] = "auto"
    """triton: this package's kernel with the residual sum. liger, apex: that library's kernel. torch: the reference."""
    swiglu: Literal["auto", "triton", "liger", "xformers", "torch"] = "auto"
    """triton: this package's kernel. liger: that library's kernel. xformers: its kernel for the backward pass, if the
    installed version still has it. torch: the reference."""
    linear: Literal["auto", "torch", "fp8", "fp8_torchao"] = "auto"
    """torch: the model's precision; `auto` selects it. fp8: 8-bit matrix products in the layers, not in the head, on
    GPUs that support fp8; the loss differs slightly. fp8_torchao: the same through torchao."""
    cross_entropy: Literal["auto", "triton", "chunked", "liger", "flash_attn", "torch"] = "auto"
    """triton: this package's kernel on all logits at once. chunked: computes the logits piece by piece and again in the
    backward pass; least memory. liger, flash_attn: that library's kernel on all logits. torch: the reference."""


class DataSection(Section):
    """Where the text comes from and how domains are mixed."""

    corpus: str = ""
    """Folder or URL of a corpus (`z2all corpus build`, `corpus adopt`) or of its tokens (`corpus tokenize`)."""
    tokenizer: str = ""
    """Tokenizer folder (written by `z2all tokenizer train`)."""
    weights: dict[str, float] | None = None
    """Fraction of tokens per domain; default: by size, in tokens if they are known, else in bytes of text."""
    temperature: float = Field(1.0, gt=0)
    """Without weights, domain fractions are proportional to size^(1/temperature); above 1 flattens them."""
    num_lanes: int | None = Field(None, gt=0)
    """Number of lanes of the data order; each lane reads one document at a time. The largest world size. Default:
    the first multiple of global_batch that is at least 64. More lanes mix the domains better."""
    packing: Literal["cut", "best_fit"] = "cut"
    """cut: concatenate documents and cut to length, no padding. best_fit: never cut a document that fits a sample."""
    num_workers: int = Field(0, ge=0)
    """Worker processes per rank that tokenize ahead, in addition to one thread. Does not affect the data order."""
    skip_samples: tuple[tuple[int, int], ...] = ()
    """Ranges [first, end) of global samples to skip, e.g. [[51200, 52224]] after a loss spike."""
    document_mask: bool = True
    """Restrict attention to one document when several are packed into a sequence."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """What to do with a record of the corpus without a valid text. skip: report it and read it as an empty document."""
    begin_of_text: bool | None = None
    """Put the tokenizer's begin-of-text token before every document. Default: if the tokenizer itself does so, as those
    of Llama models do."""
    verify_shards: bool = True
    """Compare each shard with its checksum in the background once it is opened, and stop if it differs. Not in object
    stores."""
    allow_change: bool = False
    """Resume even if the corpus or its weights differ from those the checkpoint was made with."""


class TrainSection(Section):
    """Length of the run, batch sizes and precision."""

    steps: int = Field(1000, gt=0)
    """Number of optimizer steps in the whole run."""
    stop_at_step: int | None = Field(None, gt=0)
    """Save a checkpoint and stop after this step (planned break); the schedule still spans `steps`."""
    sequence_length: int = Field(2048, gt=1)
    """Tokens per sample."""
    global_batch: int = Field(32, gt=0)
    """Samples per optimizer step over all ranks; must equal micro_batch × accumulation × ranks."""
    micro_batch: int = Field(2, gt=0)
    """Samples per forward pass per rank."""
    batch_warmup_from: int | None = Field(None, gt=0)
    """Samples per step at the start; doubled over batch_warmup_steps until global_batch is reached."""
    batch_warmup_steps: int = Field(0, ge=0)
    """Number of steps before the full batch is used."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: as in the DeepSpeed JSON, but fp32 on a CPU, where bf16 products are about 100 times slower. For fp16,
    leave it at auto and set deepspeed=zero1_fp16: fp16 needs a loss scale, which only the JSON sets."""
    gradient_clipping: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 disables clipping."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in the backward pass instead of keeping them. full: every layer, about a third more work.
    selective: the parts of each layer listed in `recompute`. true and false mean full and none."""
    recompute: tuple[Literal["attention", "mlp"], ...] = ("mlp",)
    """Used by activation_checkpointing=selective. mlp: second norm and feed-forward of a layer. attention: first norm,
    q/k/v projection, attention and output projection."""
    compile: Literal["none", "layers"] = "none"
    """layers: torch.compile fuses the forward and backward pass of each layer, after DeepSpeed has wrapped the model.
    The first step takes longer; gradient sinks and CUDA graphs are off; ops on `auto` use fusible implementations."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Replay each micro-batch as captured CUDA graphs, so that the host does not launch kernels one by one. Requires
    ZeRO-1 with fp32 accumulation; auto: use them where supported."""
    nvme_folder: str | None = None
    """Folder on a fast disk for DeepSpeed offload to `nvme` when its JSON sets no path. Default: inside run_dir."""
    collect_every: int = Field(50, ge=0)
    """Steps between runs of Python's garbage collector, on all ranks at once; 0 leaves the timing to Python."""
    bind_cpus: bool = True
    """On machines with several NUMA nodes: bind each rank to the CPUs next to its GPU."""
    dry_run: bool = True
    """On a GPU, check before the first step that the micro-batches of every stage fit, and report the memory left."""
    seed: int = Field(1234, ge=0)
    """Seed of the initial weights and of the data order."""
    init_from: str = ""
    """Local Hugging Face Llama folder (safetensors) with the initial weights; empty: random initialization. Ignored
    when resuming from a checkpoint."""
    deterministic: bool = False
    """Bitwise reproducible results on a GPU, with slower kernels; results on a CPU always are."""
    hang_seconds: float = Field(600.0, ge=0)
    """A rank without progress for this long (at least five minutes before the first step) counts as hung: stacks are
    written to logs/stacks and the run ends. Also the timeout of every collective. 0 waits forever."""
    log_every: int = Field(1, gt=0)
    """Steps between lines on the terminal; metrics.jsonl records every step."""
    profile: tuple[int, int] | None = None
    """First and last step of the profiler trace, e.g. [10, 15]; on the command line --profile 10:15."""

    @property
    def last_step(self) -> int:
        """Return the step after which training ends, as planned."""
        return min(self.steps, self.stop_at_step or self.steps)

    @field_validator("precision", mode="before")
    @classmethod
    def _fp16_is_set_elsewhere(cls, choice: Any) -> Any:
        if choice == "fp16":
            rule = "fp16 needs a loss scale, which only a DeepSpeed JSON sets"
            raise ConfigError("train.precision=fp16", rule, "Leave it out and set deepspeed=zero1_fp16, on a GPU.")
        return choice

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _accept_bool(cls, choice: Any) -> Any:
        return {True: "full", False: "none"}[choice] if isinstance(choice, bool) else choice

    @model_validator(mode="after")
    def _choices_fit(self) -> "TrainSection":
        if self.activation_checkpointing == "selective" and not self.recompute:
            raise ValueError("activation_checkpointing=selective must have at least one part in recompute=[]")
        if (self.batch_warmup_from is None) != (self.batch_warmup_steps == 0):
            raise ValueError("batch_warmup_from and batch_warmup_steps must be given together")
        if self.profile and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(f"profile={list(self.profile)} must be ascending and start at step 1 or later")
        if self.compile != "none" and self.cuda_graphs == "always":
            raise ValueError(f"cuda_graphs=always must not be used with compile={self.compile}, which has no sinks")
        return self


AnnealShape = Literal["one_minus_sqrt", "linear", "cosine"]


class StageSection(Section):
    """One stage of a multi-stage run; omitted settings are taken from `data`, `train` and `model`."""

    name: str
    """Name shown in the log."""
    steps: int | None = Field(None, gt=0)
    """Number of steps; the last stage continues to train.steps."""
    sequence_length: int | None = Field(None, gt=1)
    """Tokens per sample."""
    global_batch: int | None = Field(None, gt=0)
    """Samples per step; the micro-batch scales in proportion, so longer samples need no more memory."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary position frequencies; larger for longer samples."""
    weights: dict[str, float] | None = None
    """Fraction of tokens per domain."""
    temperature: float | None = Field(None, gt=0)
    """Without weights, domain fractions are proportional to bytes^(1/temperature)."""
    anneal: AnnealShape | None = None
    """Decay the learning rate in this shape to its minimum over this stage; it stays there afterwards."""


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """The optimizer and its settings."""

    kind: Literal[
        "auto",
        "adamw",
        "ds_fused_adam",
        "ds_cpu_adam",
        "apex_adam",
        "adamw_8bit",
        "adamw_bf16",
        "lion",
        "adafactor",
    ] = "auto"
    """auto: ds_cpu_adam if the DeepSpeed JSON offloads the state, else adamw (torch's, fused). Others: DeepSpeed's and
    apex's fused AdamW, AdamW with 8-bit or bf16 moments, lion, adafactor; compare with `z2all bench optimizers`."""
    rounding: Literal["kahan", "stochastic"] = "kahan"
    """Used by adamw_bf16 when the weights it updates are bf16. kahan: 2 more bytes per parameter hold the rounding
    error. stochastic: rounds up with a probability equal to the discarded fraction."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate, reached after the warm-up."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of matrices; norms and biases are never decayed."""


class ScheduleSection(Section):
    """Learning rate schedule."""

    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "one_minus_sqrt"] = "cosine"
    """Shape after the warm-up. cosine, linear, one_minus_sqrt: decay to the minimum by the last step. constant: no
    change. wsd: constant, then decay over the last decay_steps. inverse_sqrt: sqrt(warm-up / done)."""
    by: Literal["steps", "tokens"] = "steps"
    """Unit of progress. With tokens, steps with a larger batch or longer samples advance the schedule further."""
    warmup_steps: int | None = Field(100, ge=0)
    """Steps of linear warm-up from 0; null with by=tokens."""
    warmup_tokens: int | None = Field(None, ge=0)
    """With by=tokens: tokens of linear warm-up from 0."""
    decay_steps: int | None = Field(None, gt=0)
    """With kind=wsd: number of final steps over which the rate decays."""
    decay_tokens: int | None = Field(None, gt=0)
    """With kind=wsd and by=tokens: number of final tokens over which the rate decays."""
    decay_shape: AnnealShape = "one_minus_sqrt"
    """With kind=wsd: shape of the decay."""
    min_ratio: float = Field(0.1, ge=0, le=1)
    """Minimum learning rate after the warm-up, as a fraction of the peak."""
    allow_jump: bool = False
    """Resume even if the settings give a different learning rate from the one the checkpoint was made with."""

    @model_validator(mode="before")
    @classmethod
    def _default_warmup_is_in_steps(cls, values: Any) -> Any:
        by_tokens = isinstance(values, dict) and values.get("by") == "tokens"
        return {"warmup_steps": None, **values} if by_tokens else values

    @model_validator(mode="after")
    def _counted_in_one_unit(self) -> "ScheduleSection":
        other = "steps" if self.by == "tokens" else "tokens"
        for part, counted in (("warmup", self.warmup), ("decay", self.decay)):
            wrong, right = getattr(self, f"{part}_{other}"), f"schedule.{part}_{self.by}"
            if wrong is not None:
                what, rule = f"schedule.{part}_{other}={wrong}", f"schedule.by={self.by} counts {self.by}"
                raise ConfigError(what, rule, f"Set {right} instead, and schedule.{part}_{other}=null.")
            if counted is None and (part == "warmup" or self.kind == "wsd"):
                rule = f"is not set, and schedule.by={self.by} with schedule.kind={self.kind} needs it"
                raise ConfigError(right, rule, f"Set {right}=...")
            if counted is not None and part == "decay" and self.kind != "wsd":
                rule = f"schedule.kind={self.kind} has no separate decay length"
                raise ConfigError(f"{right}={counted}", rule, "Set schedule.kind=wsd, or omit it.")
        return self

    @property
    def warmup(self) -> int | None:
        """Return the warm-up length in the unit of `by`; never None after validation."""
        return self.warmup_tokens if self.by == "tokens" else self.warmup_steps

    @property
    def decay(self) -> int | None:
        """Return the decay length in the unit of `by`; None unless kind is wsd."""
        return self.decay_tokens if self.by == "tokens" else self.decay_steps


class CheckpointSection(Section):
    """When to save checkpoints and which to keep."""

    every_steps: int = Field(500, gt=0)
    """Steps between checkpoints."""
    at_end: bool = True
    """Also save the last step. Disable only for runs whose state is not needed, such as benchmarks."""
    snapshot_every: int = Field(0, ge=0)
    """Steps between in-memory snapshots, used for rollback and for restarts after a crash. 0: keep only snapshots that
    are being written to disk."""
    background: Literal["auto", "always", "never"] = "auto"
    """Copy the state to memory and write it to disk while training continues. auto: if there is enough memory."""
    disk_patience_seconds: float = Field(60.0, ge=0)
    """How long a save may wait for the previous write; after that the snapshot stays in memory, training continues."""
    keep_last: int = Field(2, ge=2)
    """Number of complete checkpoints to keep, at least two."""
    keep_every: int = Field(0, ge=0)
    """Also keep every checkpoint whose step is a multiple of this, e.g. 10000; 0: none. Only saved steps count."""
    keep_best: int = Field(0, ge=0)
    """Also keep this many with the lowest validation loss; 0: none. Only steps both saved and validated count."""
    verify_checksums: bool = True
    """Verify the checksum of every file before loading a checkpoint; false compares sizes only."""
    check_continuity: bool = True
    """After loading a checkpoint, compare the loss on a few tokens with the loss recorded at save time."""
    allow_model_change: bool = False
    """Resume although settings of `model` differ from those of the checkpoint, so that its weights compute something
    else; check_continuity is then not applied."""


class ValidationSection(Section):
    """Validation loss during training."""

    corpus: str = ""
    """Folder or URL of a held-out corpus, as data.corpus; empty: no validation."""
    every_steps: int = Field(500, gt=0)
    """Steps between validations."""
    samples: int = Field(64, gt=0)
    """Samples of train.sequence_length tokens over all ranks; the same samples every time."""


class ProbesSection(Section):
    """Short test questions to the model during training, recorded as curves."""

    file: str = ""
    """YAML file of probes, or the name of a shipped one (zh_en); empty: no probes. See `z2all evaluate probes`."""
    every_steps: int = Field(500, gt=0)
    """Steps between probe runs; the last step of the run is probed too."""


class ExportSection(Section):
    """Hugging Face exports of checkpoints during training."""

    every_steps: int = Field(0, ge=0)
    """Steps between exports, a multiple of checkpoint.every_steps; 0: none."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Data type of the exported weights."""
    format: Literal["llama", "z2all"] = "llama"
    """llama: loads with plain transformers. z2all: the model class of this package, which must be installed."""


class GuardSection(Section):
    """Handling of steps whose loss or gradient norm is an outlier or not finite."""

    policy: Literal["warn", "skip", "rollback", "stop"] = "skip"
    """warn: log and continue. skip: discard the update and take the next data. rollback: return to the last checkpoint
    and skip the data of the bad step. stop: end the run. Non-finite values never reach the weights."""
    deviations: float = Field(8.0, gt=0)
    """Outlier threshold above the window's median, in robust standard deviations of the logarithm."""
    window_steps: int = Field(128, ge=8)
    """Number of recent good steps used as the baseline."""
    min_steps: int = Field(32, ge=4)
    """Good steps needed before finite values are checked."""
    max_bad_steps: int = Field(20, ge=0)
    """If more of the last window_steps steps are bad, or more than half, the level has changed: warn and learn it."""
    domain_policy: Literal["warn", "act"] = "warn"
    """If only the loss of a domain is an outlier. warn: log and take the step. act: follow `policy`."""
    rollback_skips_steps: int = Field(1, ge=1)
    """Number of steps whose data a rollback skips, ending with the bad step."""

    @model_validator(mode="after")
    def _window_is_filled(self) -> "GuardSection":
        if self.min_steps > self.window_steps:
            raise ValueError(f"min_steps={self.min_steps} must not exceed window_steps={self.window_steps}")
        return self

    @property
    def bad_steps_allowed(self) -> int:
        """Number of bad steps of the last window_steps after which the level is still the same."""
        return min(self.max_bad_steps, self.window_steps // 2)


class TrackSection(Section):
    """Destinations for metrics in addition to metrics.jsonl."""

    panel: Literal["auto", "never"] = "auto"
    """Live panel on the terminal instead of one line per step; `auto`: on an interactive terminal of a local run."""
    wandb: Literal["disabled", "auto", "offline", "online"] = "disabled"
    """Weights & Biases mode; `auto`: online if an API key is set, else offline (upload with `z2all track sync`).
    A failing sink causes a warning and never stops the run."""
    project: str = "z2all"
    """W&B project."""
    tensorboard: bool = False
    """Write TensorBoard event files into sinks/tensorboard in the run folder."""
    finish_seconds: float = Field(15.0, ge=0, le=3600)
    """Time limit for sinks to send remaining data at the end of a run; `z2all track sync` sends the rest."""
