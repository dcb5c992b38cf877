"""The verbs `z2all train` and `z2all train parity`."""

from typing import Annotated, Any

import typer

from z2all_ds.base.reports import print_report
from z2all_ds.cli.options import ConfigOption, JsonOption, Overrides, refuse_without_effect
from z2all_ds.cli.verbs import VerbGroup, Verbs

RanksOption = Annotated[int | None, typer.Option(help="Ranks on this machine (default: one per GPU, or 1).")]


class _TrainsByDefault(VerbGroup):
    """Run training (or show its help) unless the first argument of `z2all train` is the name of a verb."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args and args[0] in self.commands and args[0] != "run":
            return super().make_context(info_name, args, parent, **extra)
        return self.commands["run"].make_context(info_name, args, parent, **extra)


train_app = Verbs(cls=_TrainsByDefault, help="Train on this machine, or compare DeepSpeed JSONs.")


@train_app.command("run", hidden=True)
def train(
    context: typer.Context,
    config: ConfigOption = None,
    deepspeed: Annotated[
        str | None, typer.Option(help="DeepSpeed JSON: zero0 ... zero3, zero2_offload, ... or a path.")
    ] = None,
    ranks: RanksOption = None,
    resume: Annotated[
        str, typer.Option(help="Checkpoint to resume from: auto (the newest), never, or a path.")
    ] = "auto",
    profile: Annotated[str, typer.Option(help="Write a profiler trace of these steps, e.g. 10:15.")] = "",
    overrides: Overrides = None,
) -> None:
    """Train on this machine; resumes from the newest checkpoint in the run folder.

    See also `z2all train parity --help`: compare DeepSpeed JSONs with plain torch.
    """
    from z2all_ds.train.processes.stopping import requeue_on_signals

    with requeue_on_signals():  # also while the rest is imported
        from z2all_ds.base.config import load_run_config
        from z2all_ds.train.command import train_on_this_machine

        for option, setting in (("deepspeed", "deepspeed="), ("profile", "train.profile=")):
            if any(override.startswith(setting) for override in overrides or []):
                refuse_without_effect(context, [option], f"{setting} is given too")
        chosen = [*(overrides or []), *([f"deepspeed={deepspeed}"] if deepspeed else [])]
        if profile:
            chosen.append(f"train.profile=[{', '.join(profile.split(':'))}]")
        train_on_this_machine(load_run_config(config, chosen), ranks, resume)


@train_app.command("parity")
def train_parity(
    config: ConfigOption = None,
    stages: Annotated[str, typer.Option(help="ZeRO stages, e.g. 0,1,2,3 (the default without --jsons).")] = "",
    jsons: Annotated[
        str, typer.Option(help="DeepSpeed JSONs to add, names or paths, e.g. zero2_offload,my.json.")
    ] = "",
    ranks: RanksOption = None,
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 10,
    precision: Annotated[str, typer.Option(help="fp32 or bf16 (default: train.precision, or fp32).")] = "",
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Run the same steps under several DeepSpeed JSONs and in plain torch; fail if losses or gradients differ."""
    from z2all_ds.train.parity.command import run_parity
    from z2all_ds.train.parity.report import content_of, describe

    comparison = run_parity(config, overrides or [], stages, jsons, ranks, steps, precision)
    print_report(comparison, as_json, describe, content_of)
    comparison.refuse_differences()
