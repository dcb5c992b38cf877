"""The sections of the run config: every setting with its kind, its default and its help, and what must fit within one.

Plain data: no disk, network or torch.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from z2all_ds.base.accounting import ModelShape
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.rope_scaling import check_rope_scaling


class Section(BaseModel):
    """Common ground: unknown keys fail, values are fixed after the start, docstrings under fields are their help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model's shape, under the names Llama configs use."""

    vocab_size: int = Field(64320, gt=0)
    """Rows of the embedding; at least the tokenizer's ids, padded to a multiple of 64 for speed."""
    hidden_size: int = Field(2048, gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(5632, gt=0)
    """Width inside the SwiGLU feed-forward, near 8/3 of hidden_size."""
    num_hidden_layers: int = Field(22, gt=0)
    """Number of decoder layers."""
    num_attention_heads: int = Field(32, gt=0)
    """Number of query heads; must divide hidden_size."""
    num_key_value_heads: int = Field(8, gt=0)
    """Number of key/value heads (grouped-query attention); must divide num_attention_heads."""
    max_position_embeddings: int = Field(2048, gt=0)
    """Longest sequence the model is meant for."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Stretches positions beyond a trained length: rope_type linear, dynamic, yarn or llama3, and its own fields."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square inside RMSNorm."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output head."""
    attention_bias: bool = False
    """Biases on q, k, v and the attention's output."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of attention weights dropped in training."""
    dropout1: float = Field(0.0, ge=0, lt=1)
    """Share of the attention's output dropped before it joins the residual stream."""
    dropout2: float = Field(0.0, ge=0, lt=1)
    """Share of the feed-forward's output dropped before it joins the residual stream."""
    residual_in_fp32: bool = False
    """Keep the residual stream in fp32 where the layers compute in 16 bits: rounds less, moves more memory."""

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
        """For counting parameters and FLOPs."""
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
    """Which implementation of each op runs; `auto` is resolved once at the start, printed and written down."""

    attention: Literal["auto", "packed", "sdpa", "cudnn", "flash", "varlen", "flash_attn", "flex", "eager"] = "auto"
    """packed: the fastest for each case, documents by flash_attn or varlen, all else by sdpa. sdpa: torch's fused
    attention, its own choice of kernel. cudnn, flash: that kernel of torch's, for one document a
    sequence. varlen: torch's kernel for packed documents. flash_attn: the library of that name, packed documents too.
    flex: torch's FlexAttention, compiled. eager: the formula as it stands, the reference."""
    rope: Literal["auto", "triton", "liger", "flash_attn", "torch"] = "auto"
    """triton: our kernel. liger, flash_attn: that library's kernel. torch: the reference."""
    rms_norm: Literal["auto", "triton", "liger", "apex", "torch"] = "auto"
    """triton: our kernel, with the residual sum inside. liger, apex: that library's kernel. torch: the reference."""
    swiglu: Literal["auto", "triton", "liger", "xformers", "torch"] = "auto"
    """triton: our kernel. liger: that library's. xformers: its kernel of the backward pass, where the installed version
    still has it. torch: the reference."""
    linear: Literal["auto", "torch", "fp8", "fp8_torchao"] = "auto"
    """torch: the model's precision, which is what auto takes. fp8: products in 8 bits on a GPU that has them, the
    layers' only, not the head's; the loss differs a little. fp8_torchao: the same by torchao."""
    cross_entropy: Literal["auto", "triton", "chunked", "liger", "flash_attn", "torch"] = "auto"
    """triton: our kernel on all logits at once. chunked: a piece of the logits at a time, made again in the backward
    pass: the smallest memory. liger, flash_attn: that library's kernel on all logits. torch: the reference."""


class DataSection(Section):
    """Where the text comes from and how it is mixed."""

    corpus: str = ""
    """Folder or URL of shards: a corpus (`z2all corpus build`, `corpus adopt`) or its tokens (`corpus tokenize`)."""
    tokenizer: str = ""
    """Tokenizer folder (made by `z2all tokenizer train`)."""
    weights: dict[str, float] | None = None
    """Share of tokens per domain; default: in proportion to the domains' bytes."""
    temperature: float = Field(1.0, gt=0)
    """Without weights, shares are bytes^(1/temperature): above 1 flattens them."""
    num_lanes: int | None = Field(None, gt=0)
    """Number of canonical lanes of the data order, each in the middle of one document at a time; world sizes must
    divide it. Default: the first multiple of global_batch from 64 on. Many lanes mix the domains well."""
    packing: Literal["cut", "best_fit"] = "cut"
    """cut: documents end to end, cut to length, no padding. best_fit: a document that fits into a sample is not cut."""
    num_workers: int = Field(0, ge=0)
    """Processes a rank that tokenize ahead, beside one thread. The order of the data does not depend on it."""
    skip_samples: tuple[tuple[int, int], ...] = ()
    """Global samples [first, end) to leave out, e.g. [[51200, 52224]] after a loss spike."""
    document_mask: bool = True
    """Keep attention inside a document where several are packed into one sequence."""
    allow_change: bool = False
    """Go on although the corpus or its weights are not those the checkpoint was made with."""


class TrainSection(Section):
    """How long, how much at a time, in which precision."""

    steps: int = Field(1000, gt=0)
    """Number of optimizer steps of the whole run."""
    stop_at_step: int | None = Field(None, gt=0)
    """Save a checkpoint and stop after this step, for a planned break; the schedule still spans `steps`."""
    sequence_length: int = Field(2048, gt=1)
    """Tokens per sample."""
    global_batch: int = Field(32, gt=0)
    """Samples per optimizer step over all ranks; micro_batch × accumulation × ranks must give it."""
    micro_batch: int = Field(2, gt=0)
    """Samples per forward pass and rank."""
    batch_warmup_from: int | None = Field(None, gt=0)
    """Samples of the first steps: over batch_warmup_steps they are doubled until they are global_batch."""
    batch_warmup_steps: int = Field(0, ge=0)
    """Steps before the batch is whole."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: as the DeepSpeed JSON says, but fp32 on a CPU, where bf16 products are some 100 times slower."""
    gradient_clipping: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Makes activations again in the backward pass instead of keeping them. full: each layer, for about a third more
    work. selective: the parts of layers that `recompute` names. true and false mean full and none."""
    recompute: tuple[Literal["attention", "mlp"], ...] = ("mlp",)
    """Of selective alone: mlp is a layer's second norm and its feed-forward, attention its first norm, the product for
    q, k and v, the attention and its output product."""
    compile: Literal["none", "layers"] = "none"
    """layers: torch.compile turns the passes of a layer into fused kernels, after DeepSpeed has wrapped the model. The
    first step takes longer; gradient sinks and CUDA graphs are off, and ops on `auto` are those that can be fused."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Replay each micro-batch as captured CUDA graphs, so that the host need not launch its kernels one by one. Only
    ZeRO-1 with fp32 accumulation can; auto: where it can."""
    nvme_folder: str | None = None
    """Folder on a fast disk for what a DeepSpeed JSON offloads to `nvme` without saying where. Default: in run_dir."""
    collect_every: int = Field(50, ge=0)
    """Steps between two runs of Python's garbage collector, on all ranks at once; 0 leaves the moment to Python."""
    bind_cpus: bool = True
    """On machines with several NUMA nodes: keep each rank on the processors next to its GPU."""
    dry_run: bool = True
    """Before the first step, try on a GPU whether the micro-batches of every stage fit, and say what memory is left."""
    seed: int = Field(1234, ge=0)
    """Of initial weights and of the data order."""
    init_from: str = ""
    """Local Hugging Face Llama folder (safetensors) to take the first weights from; none: they are drawn. A run that
    goes on from a checkpoint does not look at it."""
    deterministic: bool = False
    """The same run twice gives the same bits on a GPU too, by slower kernels; on a CPU it always does."""
    hang_seconds: float = Field(600.0, ge=0)
    """Without a sign of life for so long (at least five minutes before the first step) a rank hangs: stacks are written
    to logs/stacks and the run ends. Also the timeout of every collective. 0 waits for ever."""
    log_every: int = Field(1, gt=0)
    """Steps between two lines on the terminal; metrics.jsonl gets every step."""
    profile: tuple[int, int] | None = None
    """First and last step to write a profiler's trace of, e.g. [10, 15]; on the command line --profile 10:15."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _once_a_yes_or_no(cls, choice: Any) -> Any:
        return {True: "full", False: "none"}[choice] if isinstance(choice, bool) else choice

    @model_validator(mode="after")
    def _choices_fit(self) -> "TrainSection":
        if self.activation_checkpointing == "selective" and not self.recompute:
            raise ValueError("activation_checkpointing=selective must have a part of the layers in recompute=[]")
        if (self.batch_warmup_from is None) != (self.batch_warmup_steps == 0):
            raise ValueError("batch_warmup_from and batch_warmup_steps must be given together")
        if self.profile and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(f"profile={list(self.profile)} must go up from step 1")
        if self.compile != "none" and self.cuda_graphs == "always":
            raise ValueError(f"cuda_graphs=always must not meet compile={self.compile}: compiled layers have no sinks")
        return self


AnnealShape = Literal["one_minus_sqrt", "linear", "cosine"]


class StageSection(Section):
    """One stage of a run with several; what is left out is as in `data`, `train` and `model`."""

    name: str
    """For people, in the log."""
    steps: int | None = Field(None, gt=0)
    """Steps it lasts; the last stage goes on to train.steps."""
    sequence_length: int | None = Field(None, gt=1)
    """Tokens per sample."""
    global_batch: int | None = Field(None, gt=0)
    """Samples per step; the micro-batch changes in proportion, so that longer samples need no more memory."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary position frequencies; larger for longer samples."""
    weights: dict[str, float] | None = None
    """Share of tokens per domain."""
    temperature: float | None = Field(None, gt=0)
    """Without weights, shares are bytes^(1/temperature)."""
    anneal: AnnealShape | None = None
    """Over this stage the learning rate falls, in this shape, from where it is to the lowest, and stays there."""


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """Which optimizer, and its settings."""

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
    """auto: ds_cpu_adam where the DeepSpeed JSON offloads the state, else adamw (torch's, fused). Others: DeepSpeed's
    and apex's fused AdamW, AdamW with moments in 8 bits or in bf16, lion, adafactor; compare with `z2all bench
    optimizers`."""
    rounding: Literal["kahan", "stochastic"] = "kahan"
    """Of adamw_bf16 alone, where the weights it steps are bf16. kahan: 2 more bytes per parameter keep what is cut off.
    stochastic: rounded up with the probability of what is cut off."""
    lr: float = Field(3e-4, gt=0)
    """Largest learning rate, reached after the warm-up."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices; norms and biases are never decayed."""


class ScheduleSection(Section):
    """Learning rate over the run."""

    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "one_minus_sqrt"] = "cosine"
    """After the warm-up. cosine, linear, one_minus_sqrt: down to the lowest rate in that shape, by the last step.
    constant: no change. wsd: no change, then down over the last decay_steps. inverse_sqrt: sqrt(warm-up / done)."""
    by: Literal["steps", "tokens"] = "steps"
    """What progress is counted in. By tokens, steps of a larger batch or of longer samples go further."""
    warmup_steps: int | None = Field(100, ge=0)
    """Steps of linear rise from 0; by tokens, null."""
    warmup_tokens: int | None = Field(None, ge=0)
    """By tokens: tokens of linear rise from 0."""
    decay_steps: int | None = Field(None, gt=0)
    """Of wsd alone: the last steps, over which the rate falls."""
    decay_tokens: int | None = Field(None, gt=0)
    """Of wsd alone, by tokens: the last tokens, over which the rate falls."""
    decay_shape: AnnealShape = "one_minus_sqrt"
    """Of wsd alone: how the rate falls."""
    min_ratio: float = Field(0.1, ge=0, le=1)
    """Lowest learning rate after the warm-up as a share of the largest."""
    allow_jump: bool = False
    """Go on although the settings give another learning rate than those the checkpoint was made with."""

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
                raise ConfigError(what, rule, f"Give {right} instead, and schedule.{part}_{other}=null.")
            if counted is None and (part == "warmup" or self.kind == "wsd"):
                rule = f"is not set, and schedule.by={self.by} with schedule.kind={self.kind} needs it"
                raise ConfigError(right, rule, f"Give it: {right}=...")
            if counted is not None and part == "decay" and self.kind != "wsd":
                rule = f"schedule.kind={self.kind} has no decay of its own length"
                raise ConfigError(f"{right}={counted}", rule, "Choose schedule.kind=wsd, or leave it out.")
        return self

    @property
    def warmup(self) -> int | None:
        """In the unit of `by`; always there in a section that was validated."""
        return self.warmup_tokens if self.by == "tokens" else self.warmup_steps

    @property
    def decay(self) -> int | None:
        """In the unit of `by`; wsd has it, other kinds have none."""
        return self.decay_tokens if self.by == "tokens" else self.decay_steps


class CheckpointSection(Section):
    """When to save and what to keep."""

    every_steps: int = Field(500, gt=0)
    """Steps between checkpoints."""
    at_end: bool = True
    """Save the last step too. Off only where nothing is to be kept, as in a measurement."""
    snapshot_every: int = Field(0, ge=0)
    """Steps between snapshots that stay in memory: for going back, and for going on after a crash. 0 takes none but
    those that are on their way to the disk."""
    background: Literal["auto", "always", "never"] = "auto"
    """Copy the state into memory and write it from there while training goes on. auto: where the memory suffices."""
    disk_patience_seconds: float = Field(60.0, ge=0)
    """How long a save may wait for the write before it. After that it stays in memory, and training goes on."""
    keep_last: int = Field(2, ge=2)
    """Complete checkpoints to keep, never fewer than two."""
    keep_every: int = Field(0, ge=0)
    """Keep those of every so many steps too, e.g. 10000; 0: none. Only steps that are saved count."""
    keep_best: int = Field(0, ge=0)
    """Keep so many with the lowest validation loss too; 0: none. Only steps that are saved and validated count."""
    verify_checksums: bool = True
    """Read every byte of a checkpoint against its checksum before loading it; false compares sizes only."""
    check_continuity: bool = True
    """After a checkpoint is read, hold the loss of some tokens against what it was when they were saved."""


class ValidationSection(Section):
    """Loss on held-out text while training."""

    corpus: str = ""
    """Folder or URL of held-out shards, as data.corpus; none: no validation."""
    every_steps: int = Field(500, gt=0)
    """Steps between two looks."""
    samples: int = Field(64, gt=0)
    """Samples of train.sequence_length tokens, over all ranks, the same ones every time."""


class ProbesSection(Section):
    """Small questions to the model while it trains, each with its curve."""

    file: str = ""
    """YAML of probes, or the name of a shipped one (zh_en); none: no probes. See `z2all evaluate probes`."""
    every_steps: int = Field(500, gt=0)
    """Steps between two looks; the run's last step is looked at too."""


class ExportSection(Section):
    """Hugging Face folders made of checkpoints while training goes on."""

    every_steps: int = Field(0, ge=0)
    """Steps between two exports, a multiple of checkpoint.every_steps; 0: none."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of the exported weights."""
    format: Literal["llama", "z2all"] = "llama"
    """llama: loads with plain transformers. z2all: our own model class, with this package."""


class GuardSection(Section):
    """What to do about a step whose loss or gradient is out of all proportion, or not a number."""

    policy: Literal["warn", "skip", "rollback", "stop"] = "skip"
    """warn: say so and go on. skip: leave the weights as they are and take the next data. rollback: go back to the last
    checkpoint and leave the step's data out. stop: end the run. What is not finite never reaches the weights."""
    deviations: float = Field(8.0, gt=0)
    """How far above the usual is out of proportion: in robust standard deviations of the logarithm over the window."""
    window_steps: int = Field(128, ge=8)
    """Good steps that say what is usual."""
    min_steps: int = Field(32, ge=4)
    """Good steps needed before anything finite is judged."""
    max_bad_steps: int = Field(20, ge=0)
    """The run ends when there are more among the last window_steps steps."""
    rollback_skips_steps: int = Field(1, ge=1)
    """rollback leaves out the data of so many steps, the bad one the last of them."""

    @model_validator(mode="after")
    def _window_is_filled(self) -> "GuardSection":
        if self.min_steps > self.window_steps:
            raise ValueError(f"min_steps={self.min_steps} must not exceed window_steps={self.window_steps}")
        return self


class TrackSection(Section):
    """Where curves go besides metrics.jsonl."""

    panel: Literal["auto", "never"] = "auto"
    """A live panel on the terminal instead of a line a step: `auto` where a person sits at the machine that trains."""
    wandb: Literal["disabled", "auto", "offline", "online"] = "disabled"
    """Weights & Biases mode; `auto` is online where an API key is set, else offline, to be sent by `z2all track sync`.
    A failing sink costs a warning, never the run."""
    project: str = "z2all"
    """W&B project."""
    tensorboard: bool = False
    """Write TensorBoard's event files into the run folder's sinks/tensorboard."""
    finish_seconds: float = Field(15.0, ge=0, le=3600)
    """At the end of a run, sinks may take so long to deliver what is left; `z2all track sync` sends the rest."""
