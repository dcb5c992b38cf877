"""The verb `z2all plan`."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.base.reports import print_report
from z2all_ds.cli.options import JsonOption, Overrides, given

GpuHours = Annotated[float, typer.Option(help="Mean GPU hours between failures; Llama 3 reported 50,000.")]
NOT_FOR_SWEEP = {"gpus", "write", "fit"}
FOR_FIT = {"model", "overrides", "as_json", "fit"}
"""Parameter names of `plan`."""


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", "--config", help="Preset name or run YAML.")] = "z2all_1b",
    gpus: Annotated[int, typer.Option(help="Total number of GPUs.")] = 1,
    gpu: Annotated[
        str | None, typer.Option(help="GPU name, e.g. h100, a100-80, rtx4090: sets memory, speed and link.")
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU, e.g. 80GB or 80GiB.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Peak dense 16-bit throughput of one GPU, in TFLOP/s.")
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs per node (default: 8, or all).")] = None,
    link: Annotated[
        str | None, typer.Option(help="Link between GPUs of a node: nvlink4, pcie4, ... or 200GB/s.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Network between nodes: ib400, eth100, ... or 100Gbit/s (default: eth100).")
    ] = None,
    adapters: Annotated[int | None, typer.Option(help="Network adapters per node (default: 1).")] = None,
    host_bus: Annotated[str | None, typer.Option(help="Link between a GPU and its host (default: pcie4).")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory per node, e.g. 1TB; it then also limits what fits.")
    ] = None,
    host_memory_speed: Annotated[
        str | None, typer.Option(help="Host memory bandwidth for optimizer steps on the CPU, e.g. 100GB/s.")
    ] = None,
    disk_speed: Annotated[str | None, typer.Option(help="Disk speed for checkpoints and offload, e.g. 3GB/s.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="File with measured link and disk speeds, written by `z2all doctor --json`.")
    ] = None,
    reached: Annotated[float | None, typer.Option(help="Fraction of peak throughput that training reaches.")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the whole run, e.g. 300B (default: from train.steps).")
    ] = None,
    gpu_hours_per_failure: GpuHours = 50_000.0,
    restart_seconds: Annotated[float, typer.Option(help="Seconds from a failure to the next new step.")] = 300.0,
    sweep: Annotated[
        str | None, typer.Option(help="Compare numbers of GPUs instead of JSONs, e.g. gpus=8,64,512,4096.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --sweep: plot the curves to this .png or .svg.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the run config with the best choice to this YAML.")] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Find the largest micro-batch on this machine's GPUs by trial.")
    ] = False,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Estimate memory, traffic, time and failures of a run under each ZeRO JSON, and recommend one."""
    from z2all_ds.base.config import load_run_config
    from z2all_ds.base.errors import ConfigError
    from z2all_ds.base.sizes import parse_count
    from z2all_ds.plan import Risks, Wishes, content_of, describe, make_fleet, make_plan

    options = given(context)
    not_for_sweep = [option for name, option in options.items() if name in NOT_FOR_SWEEP]
    if sweep is not None and not_for_sweep:
        raise ConfigError("--sweep", f"cannot be combined with {', '.join(not_for_sweep)}", "Give one or the other.")
    not_for_fit = [option for name, option in options.items() if name not in FOR_FIT]
    if fit and not_for_fit:
        rule = f"runs on the GPUs of this machine and cannot be combined with {', '.join(not_for_fit)}"
        raise ConfigError("--fit", rule, "Leave that out.")
    run = load_run_config(model, overrides)
    if fit:
        from z2all_ds.bench import fit as impl

        print_report(impl.fit_here(model, overrides or []), as_json, impl.describe)
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
        raise ConfigError(f"--out {out}", "needs --sweep", "Give --sweep too, e.g. --sweep gpus=8,64,512.")
    if sweep is not None:
        from z2all_ds.plan.scaling import show_sweep

        show_sweep(run, wishes, sweep, budget, risks, out, as_json)
        return
    if write:
        from z2all_ds.plan.report import check_name, write_choice

        check_name(write)  # before the computation
    found_plan = make_plan(run, make_fleet(wishes), budget, risks)
    print_report(found_plan, as_json, describe, content_of)
    if write:
        write_choice(found_plan, write)
