"""The verb `z2all plan`."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.base.reports import print_report
from z2all_ds.cli.options import JsonOption, Overrides

GpuHours = Annotated[float, typer.Option(help="GPU hours between two failures; Llama 3 saw 50,000.")]
NOT_FOR_SWEEP = {"gpus", "write", "fit"}
FOR_FIT = {"model", "overrides", "as_json", "fit"}
"""Parameters by their names here."""


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", "--config", help="Preset or run YAML.")] = "z2all_1b",
    gpus: Annotated[int, typer.Option(help="In all.")] = 1,
    gpu: Annotated[str | None, typer.Option(help="Its name, e.g. h100, a100-80, rtx4090: memory, speed, link.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Of one GPU, e.g. 80GB or 80GiB.")] = None,
    peak_tflops: Annotated[float | None, typer.Option(help="Of one GPU, dense, in 16 bits.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Of one machine (default: 8, or all).")] = None,
    link: Annotated[str | None, typer.Option(help="Between GPUs of a machine: nvlink4, pcie4, ... or 200GB/s.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Between machines: ib400, eth100, ... or 100Gbit/s (default: eth100).")
    ] = None,
    adapters: Annotated[int | None, typer.Option(help="Of the network, in each machine (default: 1).")] = None,
    host_bus: Annotated[str | None, typer.Option(help="Between a GPU and its host (default: pcie4).")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Of one machine, e.g. 1TB; what fits must fit there too.")
    ] = None,
    host_memory_speed: Annotated[str | None, typer.Option(help="For steps on the CPU, e.g. 100GB/s.")] = None,
    disk_speed: Annotated[str | None, typer.Option(help="For checkpoints and offload, e.g. 3GB/s.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Links and disk as in this file, written by `z2all doctor --json`.")
    ] = None,
    reached: Annotated[float | None, typer.Option(help="Share of the peak that training computes at.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Of the whole run, e.g. 300B (default: by train.steps).")] = None,
    gpu_hours_per_failure: GpuHours = 50_000.0,
    restart_seconds: Annotated[float, typer.Option(help="From a failure to the next new step.")] = 300.0,
    sweep: Annotated[str | None, typer.Option(help="Fleets instead of JSONs, e.g. gpus=8,64,512,4096.")] = None,
    out: Annotated[Path | None, typer.Option(help="Of --sweep: draw the curves, .png or .svg.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the run YAML with the best choice here.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Largest micro-batch on this machine's GPUs, by trial.")] = False,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """What a run takes of GPUs, network, time and failures under each ZeRO JSON, and which one to take."""
    from z2all_ds.base.config import load_run_config
    from z2all_ds.base.errors import ConfigError
    from z2all_ds.base.sizes import parse_count
    from z2all_ds.plan import Risks, Wishes, make_fleet, make_plan, render, to_json

    given = _given(context)
    if sweep is not None and given & NOT_FOR_SWEEP:
        raise ConfigError("--sweep", f"goes without {_options(given & NOT_FOR_SWEEP)}", "Give one or the other.")
    if fit and given - FOR_FIT:
        rule = f"tries on the GPUs that are here, and takes no {_options(given - FOR_FIT)}"
        raise ConfigError("--fit", rule, "Leave it out.")
    run = load_run_config(model, overrides)
    if fit:
        from z2all_ds.bench.fit import content_of, fit_here

        print_report(fit_here(model, overrides or []), as_json, lambda found: [found.told], content_of)
        return
    wishes = Wishes(
        gpus=gpus,
        gpu=gpu,
        gpu_memory=gpu_memory,
        peak_tflops=peak_tflops,
        gpus_per_node=gpus_per_node,
        link=link,
        network=network,
        adapters=adapters,
        host_bus=host_bus,
        host_memory=host_memory,
        host_memory_speed=host_memory_speed,
        disk_speed=disk_speed,
        reached=reached,
        measured=measured,
    )
    risks = Risks(gpu_hours_per_failure, restart_seconds)
    budget = parse_count(tokens, "--tokens") if tokens is not None else None
    if out and sweep is None:
        raise ConfigError(f"--out {out}", "is for --sweep", "Give --sweep too, e.g. --sweep gpus=8,64,512.")
    if sweep is not None:
        from z2all_ds.plan.scaling_report import show_sweep

        show_sweep(run, wishes, sweep, budget, risks, out, as_json)
        return
    if write:
        from z2all_ds.plan.write import check_name, write_choice

        check_name(write)  # before any work
    found_plan = make_plan(run, make_fleet(wishes), budget, risks)
    if as_json:
        print(to_json(found_plan))
    else:
        render(found_plan)
    if write:
        write_choice(found_plan, write)


def _given(context: typer.Context) -> set[str]:
    """Parameters that the command line has, rather than their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _options(names: set[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
