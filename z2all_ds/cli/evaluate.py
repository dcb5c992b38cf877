"""The verbs of `z2all evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.base.errors import ConfigError, TrainingError, Z2allError
from z2all_ds.base.reports import print_report, to_json
from z2all_ds.cli.options import FollowLinksOption, JsonOption, given, refuse_without_effect
from z2all_ds.cli.verbs import Verbs

evaluate_app = Verbs(no_args_is_help=True, help="Evaluate a model.")

ModelArgument = Annotated[
    Path, typer.Argument(help="Hugging Face folder, run folder (newest checkpoint) or checkpoint.")
]
DtypeOption = Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: bf16 on a GPU, fp32 on a CPU.")]


@evaluate_app.command("ppl")
def ppl(
    models: Annotated[list[Path], typer.Argument(help="Hugging Face folders, run folders or checkpoints.")],
    data: Annotated[
        str,
        typer.Option("--data", "--corpus", help="Corpus, .jsonl, .parquet or .txt file, or a folder of such files."),
    ],
    documents: Annotated[
        int | None, typer.Option(help="Documents per domain; 0: all (default: 50 of a corpus, all of plain files).")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Context window in tokens (default: the model's maximum).")] = None,
    stride: Annotated[
        int | None, typer.Option(help="If below the window, each token has at least window - stride tokens of context.")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="Concatenate documents and cut them as in training.")
    ] = False,
    bos: Annotated[
        str,
        typer.Option(
            help="Begin-of-text before each document: yes, no (the first token and its bytes do not count), or auto "
            "(the tokenizer's default)."
        ),
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Windows per batch.")] = 8,
    ranks: Annotated[int, typer.Option(help="Number of processes, each on its own GPU or share of the cores.")] = 1,
    dtype: DtypeOption = "auto",
    follow_links: FollowLinksOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity per domain, by token, byte and character; bits per byte are comparable across tokenizers."""
    from z2all_ds.evaluate.perplexity import describe, measure_perplexity
    from z2all_ds.evaluate.perplexity_rank import PerplexitySettings

    settings = PerplexitySettings(data, documents, window, stride, packed, bos, batch, dtype, follow_links)
    measured = measure_perplexity(models, settings, ranks)
    print_report(measured, as_json, describe, lambda found: {"question": settings, "models": found})


@evaluate_app.command("probes")
def probes(
    models: Annotated[
        list[Path], typer.Argument(help="Run folders (all checkpoints), checkpoints or Hugging Face folders.")
    ],
    file: Annotated[
        str | None,
        typer.Option(help="YAML of probes, or the name of a shipped one (default: the run's own, else zh_en)."),
    ] = None,
    all_checkpoints: Annotated[
        bool, typer.Option("--all-checkpoints/--newest", help="For a run folder: all checkpoints or only the newest.")
    ] = True,
    dtype: DtypeOption = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Texts per batch.")] = 16,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 8 if a probe misses its expectation.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask probes: probability of a completion, perplexity of a sentence, A against B, format of an answer.

    For a run folder, the answers of all checkpoints are stored in evaluations/probes_FILE.json, where the board reads
    them.
    """
    from z2all_ds.evaluate.probe_report import content_of, describe, failed_probes
    from z2all_ds.evaluate.probe_runs import run_probes

    results = run_probes(models, file, all_checkpoints, dtype, batch)
    print_report(results, as_json, describe, content_of)
    failed = failed_probes(results)
    if strict and failed:
        raise TrainingError(
            f"probes {', '.join(failed)}", "missed their expectation", "Train longer, or lower the expectation."
        )


@evaluate_app.command("harness")
def harness(
    context: typer.Context,
    model: Annotated[
        Path | None, typer.Argument(help="Hugging Face folder, run folder (newest checkpoint) or checkpoint.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Comma-separated names; * and ? are wildcards.")] = "",
    include: Annotated[Path | None, typer.Option(help="Folder with your own tasks (YAML) and their data.")] = None,
    list_tasks: Annotated[bool, typer.Option("--list", help="Only list the tasks under --include.")] = False,
    shots: Annotated[int | None, typer.Option(help="Examples before the question (default: the task's).")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N questions of each task.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts per batch; halved when memory runs out.")] = 8,
    reshape: Annotated[
        str, typer.Option(help="Ask again in other forms: letters,others_wrong,shuffled, or all.")
    ] = "none",
    shuffles: Annotated[int, typer.Option(help="Number of orders that `shuffled` averages over.")] = 3,
    fields: Annotated[
        str | None, typer.Option(help="Fields of a task: question=NAME,options=NAME (or N1|N2|N3),answer=NAME.")
    ] = None,
    others_wrong_text: Annotated[str | None, typer.Option(help="Option text for `others_wrong`.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for examples, shuffles and sampling.")] = 1234,
    dtype: DtypeOption = "auto",
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template.")] = False,
    allow_task_code: Annotated[
        bool, typer.Option("--allow-task-code", help="Run Python code that tasks name (refused by default).")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run lm-evaluation-harness benchmarks offline; --reshape reveals memorized answers."""
    from contextlib import suppress

    from z2all_ds.base.outputs import MARK, require_writable, write_output
    from z2all_ds.evaluate.harness import run
    from z2all_ds.evaluate.harness import tasks as harness_tasks
    from z2all_ds.evaluate.harness.settings import HarnessSettings, parse_reshapings

    if list_tasks:
        if include is None:
            raise ConfigError("--list", "needs a folder of tasks", "Give --include DIR.")
        others = given(context).keys() - {"include", "list_tasks", "as_json"}
        refuse_without_effect(context, others, "--list only lists tasks")
        harness_tasks.require_harness()
        found = harness_tasks.list_tasks(include)
        print_report(found, as_json, lambda tasks: (f"{one.name}\t{one.kind}\t{one.file}" for one in tasks))
        return
    if model is None:
        raise ConfigError("MODEL", "is missing", "Give a Hugging Face folder, a run folder or a checkpoint.")
    reshapings = parse_reshapings(reshape)
    for option, needed, is_there in (
        ("shuffles", "--reshape shuffled", "shuffled" in reshapings),
        ("others_wrong_text", "--reshape others_wrong", "others_wrong" in reshapings),
        ("fields", "--reshape", bool(reshapings)),
    ):
        if not is_there:
            refuse_without_effect(context, [option], f"needs {needed}")
    settings = HarnessSettings(
        tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
        include=None if include is None else str(include),
        shots=shots,
        limit=limit,
        batch=batch,
        reshape=reshapings,
        shuffles=shuffles,
        seed=seed,
        chat=chat,
        fields=fields,
        others_wrong_text=others_wrong_text,
        allow_task_code=allow_task_code,
    )
    if out is not None:  # fail now, not after an hour
        require_writable(out)

    def write(content: dict[str, object]) -> None:
        if out is not None:
            write_output(out, to_json({"creator": MARK, **content}) + "\n")

    def keep(scores: dict[str, object]) -> None:
        with suppress(OSError, Z2allError):  # the final write reports the error
            write(scores)

    report = run.run_harness(model, settings, dtype, keep)
    try:
        write(report.content())
    finally:  # a full disk does not take the results away
        print_report(report, as_json, run.describe, run.HarnessReport.content)
