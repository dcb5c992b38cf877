"""`z2all evaluate ...`: judge a model."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import print_report, to_json
from z2all_ds.cli.options import JsonOption

evaluate_app = typer.Typer(no_args_is_help=True, help="Judge a model.")

ModelArgument = Annotated[
    Path, typer.Argument(help="Hugging Face folder, run folder (its newest checkpoint) or checkpoint.")
]
DtypeOption = Annotated[str, typer.Option(help="fp32, bf16, fp16; auto: bf16 on a GPU, fp32 on a CPU.")]


@evaluate_app.command("ppl")
def ppl(
    models: Annotated[list[Path], typer.Argument(help="Hugging Face folders, run folders or checkpoints.")],
    data: Annotated[
        str, typer.Option("--data", "--corpus", help="Corpus, or .jsonl, .parquet or .txt file, or a folder of them.")
    ],
    documents: Annotated[
        int | None, typer.Option(help="Per domain; 0: all (default: 50 of a corpus, all of plain files).")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Tokens the model sees (default: as many as it allows).")] = None,
    stride: Annotated[
        int | None, typer.Option(help="Below the window: each token has at least window - stride before it.")
    ] = None,
    packed: Annotated[bool, typer.Option("--packed", help="Documents in a row, cut as in training.")] = False,
    bos: Annotated[
        str,
        typer.Option(
            help="Begin-of-text before each document: yes; no: the first token does not count, nor do its bytes; auto: "
            "as the tokenizer does by itself."
        ),
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Windows at a time.")] = 8,
    ranks: Annotated[int, typer.Option(help="Processes, each on its GPU or share of the cores.")] = 1,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Perplexity per domain: by token, byte and character, and bits per byte so that tokenizers can be compared."""
    from z2all_ds.evaluate.perplexity import measure_perplexity
    from z2all_ds.evaluate.perplexity_report import content_of, describe
    from z2all_ds.evaluate.perplexity_share import Question

    question = Question(data, documents, window, stride, packed, bos, batch, dtype)
    measured = measure_perplexity(models, question, ranks)
    print_report(measured, as_json, describe, lambda found: content_of(found, question))


@evaluate_app.command("probes")
def probes(
    models: Annotated[
        list[Path], typer.Argument(help="Run folders (every checkpoint there is), checkpoints, Hugging Face folders.")
    ],
    file: Annotated[
        str | None, typer.Option(help="YAML of probes, or a shipped one's name. Default: the run's own, else zh_en.")
    ] = None,
    all_checkpoints: Annotated[
        bool, typer.Option("--all-checkpoints/--newest", help="Of a run folder: all, or the newest alone.")
    ] = True,
    dtype: DtypeOption = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Texts read at a time.")] = 16,
    strict: Annotated[bool, typer.Option("--strict", help="End with code 8 where one is not as expected.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask small questions: probability of a completion, perplexity of a sentence, A against B, form of an answer.

    Of a run folder the answers of all checkpoints are kept in evaluations/probes_FILE.json, where the board finds them.
    """
    from z2all_ds.evaluate.probe_report import content_of, describe, failures_at_last
    from z2all_ds.evaluate.probe_runs import ask_models

    asked = ask_models(models, file, all_checkpoints, dtype, batch)
    print_report(asked, as_json, describe, content_of)
    failed = failures_at_last(asked)
    if strict and failed:
        from z2all_ds.base.errors import TrainingError

        raise TrainingError(f"probes {', '.join(failed)}", "not as expected", "Train on, or expect less of them.")


@evaluate_app.command("harness")
def harness(
    model: Annotated[
        Path | None, typer.Argument(help="Hugging Face folder, run folder (its newest checkpoint) or checkpoint.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Names with commas between; * and ? may stand in them.")] = "",
    include: Annotated[Path | None, typer.Option(help="Folder with tasks of one's own (YAML) and their data.")] = None,
    list_tasks: Annotated[bool, typer.Option("--list", help="Only list the tasks under --include.")] = False,
    shots: Annotated[int | None, typer.Option(help="Examples before the question (default: as the task says).")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many questions of each task.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts at a time; halved where memory does not suffice.")] = 8,
    reshape: Annotated[str, typer.Option(help="letters,others_wrong,shuffled, or all: does the score hold?")] = "none",
    shuffles: Annotated[int, typer.Option(help="Orders tried by `shuffled`, of which the mean is taken.")] = 3,
    fields: Annotated[
        str | None, typer.Option(help="Where a task keeps them: question=NAME,options=NAME (or N1|N2|N3),answer=NAME.")
    ] = None,
    others_wrong_text: Annotated[str | None, typer.Option(help="Wording of `others_wrong`.")] = None,
    seed: Annotated[int, typer.Option(help="For examples, shuffles and sampling.")] = 1234,
    dtype: DtypeOption = "auto",
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Prompts by the tokenizer's chat template.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results there as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Benchmarks by lm-evaluation-harness, without network; --reshape shows memorised answers."""
    from contextlib import suppress

    from z2all_ds.base.atomic import explain_disk_errors, make_folder, write_whole
    from z2all_ds.evaluate.harness_tasks import list_tasks as found_under
    from z2all_ds.evaluate.harness_tasks import require_harness

    if list_tasks:
        if include is None:
            raise ConfigError("--list", "lists the tasks of a folder", "Give --include DIR.")
        require_harness()
        found = found_under(include)
        print_report(found, as_json, lambda tasks: (f"{one.name}\t{one.kind}\t{one.file}" for one in tasks))
        return
    if model is None:
        raise ConfigError("MODEL", "is missing", "Give a Hugging Face folder, a run folder or a checkpoint.")
    from z2all_ds.evaluate import harness as room

    settings = room.HarnessSettings(
        tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
        include=None if include is None else str(include),
        shots=shots,
        limit=limit,
        batch=batch,
        reshape=room.parse_reshapings(reshape),
        shuffles=shuffles,
        seed=seed,
        chat=chat,
        fields=fields,
        others_wrong_text=others_wrong_text,
    )
    if out is not None:  # now: not after an hour
        if out.is_dir():
            raise ConfigError(f"--out {out}", "is a folder", "Give the name of a file in it.")
        make_folder(out.parent)

    def keep(scores: dict[str, object]) -> None:
        if out is not None:
            with suppress(OSError):  # it is written once more, and then told
                write_whole(out, to_json(scores) + "\n")

    report = room.run_harness(model, settings, dtype, keep)
    try:
        if out is not None:
            with explain_disk_errors(out.parent):
                write_whole(out, to_json(report.content()) + "\n")
    finally:  # a full disk does not take the results away
        print_report(report, as_json, room.describe, room.HarnessReport.content)
