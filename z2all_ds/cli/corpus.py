"""The verbs of `z2all corpus`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from z2all_ds.base.reports import print_lines, print_report
from z2all_ds.cli.options import JsonOption, WorkersOption

if TYPE_CHECKING:
    from z2all_ds.corpus import Manifest

corpus_app = typer.Typer(no_args_is_help=True, help="Raw text to clean shards with a manifest.")

CorpusArgument = Annotated[Path, typer.Argument(help="Corpus folder.")]
OutOption = Annotated[Path, typer.Option(help="Corpus folder.")]
MaxBytesOption = Annotated[int | None, typer.Option(help="Limit of each domain in bytes.")]
CleanOption = Annotated[
    list[str] | None, typer.Option("--clean", help="A cleaning step, e.g. control_characters, min_chars=20, or all.")
]
OnErrorOption = Annotated[str, typer.Option(help="What to do with broken data: stop or skip.")]
BadShareOption = Annotated[float, typer.Option(help="With skip: stop when more than this share of the rows is broken.")]
ReplaceOption = Annotated[bool, typer.Option("--replace", help="Do away with what was built from other data.")]
RayOption = Annotated[str | None, typer.Option(help="Address of a Ray cluster to work on; `local` starts one here.")]
PluginOption = Annotated[Path | None, typer.Option(help="Python file that registers further converters.")]


@corpus_app.command("convert")
def corpus_convert(
    source: Annotated[str, typer.Argument(help="Name of the converter, see `corpus sources`.")],
    raw: Annotated[list[str], typer.Argument(help="Raw files, folders or patterns; .gz, .zst, .zip and .tar.* too.")],
    out: OutOption,
    domain: Annotated[str | None, typer.Option(help="Name of the domain (default: the source's).")] = None,
    form: Annotated[str, typer.Option(help="jsonl, json_array, parquet, txt or lines, if left open.")] = "",
    fields: Annotated[str, typer.Option(help="For generic: content=RAW_FIELD,title=RAW_FIELD...")] = "",
    compose: Annotated[str, typer.Option(help=r"Content from several fields, e.g. '{title}\n{content}'.")] = "",
    clean: CleanOption = None,
    on_error: OnErrorOption = "stop",
    max_bad_share: BadShareOption = 0.01,
    max_bytes: MaxBytesOption = None,
    max_record_bytes: Annotated[int, typer.Option(help="Longer rows are broken ones.")] = 64 * 2**20,
    max_expansion: Annotated[float, typer.Option(help="Refuse archives that grow more than so many times.")] = 200.0,
    workers: WorkersOption = None,
    ray: RayOption = None,
    plugin: PluginOption = None,
    replace: ReplaceOption = False,
) -> None:
    """Add one source to a corpus: convert its raw files, clean them, and write shards."""
    from z2all_ds.corpus import Executor, SourceSpec, build_corpus
    from z2all_ds.corpus.cleaning import CleaningRules
    from z2all_ds.corpus.converters import parse_field_map
    from z2all_ds.corpus.forms import ReadLimits

    spec = SourceSpec(
        domain or source,
        source,
        tuple(Path(path).expanduser() for path in raw),
        max_bytes,
        form,
        tuple(parse_field_map(fields).items()) if fields else (),
        compose.replace("\\n", "\n"),
        CleaningRules.parse(clean or []),
        on_error,
        max_bad_share,
        ReadLimits(max_record_bytes=max_record_bytes, max_expansion=max_expansion),
        plugin,
    )
    manifest = build_corpus(out, [spec], replace=replace, add=True, executor=Executor(workers, ray))
    _tell(out, manifest, [spec.domain])


@corpus_app.command("build")
def corpus_build(
    sources: Annotated[list[str], typer.Argument(help="DOMAIN=CONVERTER[:PATH,PATH...], see `corpus sources`.")],
    out: OutOption,
    max_bytes: MaxBytesOption = None,
    clean: CleanOption = None,
    on_error: OnErrorOption = "stop",
    max_bad_share: BadShareOption = 0.01,
    workers: WorkersOption = None,
    ray: RayOption = None,
    plugin: PluginOption = None,
    replace: ReplaceOption = False,
) -> None:
    """Build a corpus from one or more sources in one go."""
    from z2all_ds.base.errors import ConfigError
    from z2all_ds.corpus import Executor, SourceSpec, build_corpus
    from z2all_ds.corpus.cleaning import CleaningRules

    rules, specs = CleaningRules.parse(clean or []), []
    for text in sources:
        domain, equals, rest = text.partition("=")
        converter, _, paths = rest.partition(":")
        if not equals or not converter:
            raise ConfigError(f"source {text!r}", "must read DOMAIN=CONVERTER[:PATH,...]", "E.g. code=python_code.")
        raw = tuple(Path(p).expanduser() for p in paths.split(",") if p)
        specs.append(
            SourceSpec(
                domain,
                converter,
                raw,
                max_bytes,
                cleaning=rules,
                on_error=on_error,
                max_bad_share=max_bad_share,
                plugin=plugin,
            )
        )
    manifest = build_corpus(out, specs, replace=replace, executor=Executor(workers, ray))
    _tell(out, manifest, [spec.domain for spec in specs])


def _tell(out: Path, manifest: "Manifest", domains: list[str]) -> None:
    from z2all_ds.corpus import read_report
    from z2all_ds.corpus.report import summary_lines

    for domain in domains:
        print_lines(summary_lines(read_report(out, domain)))


@corpus_app.command("report")
def corpus_report(corpus: CorpusArgument, as_json: JsonOption = False) -> None:
    """What the build counted: broken rows with their places, and what each cleaning step changed or dropped."""
    from z2all_ds.corpus import load_manifest, read_report
    from z2all_ds.corpus.report import full_lines

    reports: dict[str, Any] = {domain: read_report(corpus, domain) for domain in load_manifest(corpus).domains}
    print_report(reports, as_json, lambda found: (line for one in found.values() for line in full_lines(one)))


@corpus_app.command("sources")
def corpus_sources(plugin: PluginOption = None) -> None:
    """List the converters."""
    from z2all_ds.corpus.converters import describe_converters, load_plugin

    if plugin is not None:
        load_plugin(plugin)
    for name, purpose in describe_converters().items():
        print(f"{name:20} {purpose}")


@corpus_app.command("audit")
def corpus_audit(corpus: CorpusArgument, workers: WorkersOption = None) -> None:
    """Check every shard and record against the manifest: hashes, schema, numbers, encoding."""
    from z2all_ds.base.errors import DataError
    from z2all_ds.corpus import audit_corpus

    report = audit_corpus(corpus, workers)
    for line in (*report.problems, *(f"warning: {warning}" for warning in report.warnings)):
        print(line)
    if report.problems:
        raise DataError(f"corpus {corpus}", f"{len(report.problems)} problems", "Build it again.")
    print(f"{corpus}: {report.documents:,} documents in {report.shards} shards, no problem found")


@corpus_app.command("stats")
def corpus_stats(
    corpus: CorpusArgument,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder, to count tokens.")] = None,
    sample: Annotated[float, typer.Option(help="Look at this share of the text and scale up.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Draw the lengths into this .png or .svg.")] = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Documents, bytes, lengths and tokens of each domain."""
    from z2all_ds.data import corpus_stats as room

    found = room.corpus_stats(corpus, tokenizer, workers, sample)
    print_report(found, as_json, room.describe, room.content_of)
    if plot is not None:
        print(room.draw_lengths(found, plot))


@corpus_app.command("sample")
def corpus_sample(
    corpus: CorpusArgument,
    count: Annotated[int, typer.Option("--count", "-n", help="So many documents.")] = 3,
    domain: Annotated[str | None, typer.Option(help="Of this domain alone.")] = None,
    gid: Annotated[int | None, typer.Option(help="The document with this number.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed, other documents.")] = 0,
    max_chars: Annotated[int, typer.Option(help="Of each document.")] = 1000,
) -> None:
    """Look at documents."""
    from z2all_ds.corpus import sample as room

    documents = room.sample_documents(corpus, count, domain, seed) if gid is None else [room.find_document(corpus, gid)]
    print_lines(room.describe(documents, max_chars))


@corpus_app.command("split")
def corpus_split(
    corpus: CorpusArgument,
    out: Annotated[Path, typer.Option(help="Folder for the two corpora, train and validation.")],
    share: Annotated[float, typer.Option(help="Share of the documents that goes to validation.")] = 0.001,
    seed: Annotated[str, typer.Option(help="Another seed, another choice.")] = "",
    workers: WorkersOption = None,
) -> None:
    """Set documents aside for validation, chosen by a hash of their text: the same ones when the corpus grows."""
    from z2all_ds.corpus.split import split_corpus

    report = split_corpus(corpus, out, share, seed, workers)
    for domain, (documents, size) in report.train.items():
        aside = report.validation.get(domain, (0, 0))
        print(f"{domain}: train {documents:,} documents, {size:,} bytes; validation {aside[0]:,}, {aside[1]:,} bytes")
    for warning in report.warnings:
        print(f"warning: {warning}")


@corpus_app.command("tokenize")
def corpus_tokenize(
    corpus: Annotated[str, typer.Argument(help="Corpus folder or URL.")],
    tokenizer: Annotated[Path, typer.Option(help="Tokenizer folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the tokens.")],
    workers: WorkersOption = None,
    replace: ReplaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tokenize a corpus once: training reads the tokens instead of the text, with the same samples."""
    from z2all_ds.data.tokens import tokenizing as room

    manifest = room.tokenize_corpus(corpus, tokenizer, out, workers, replace)
    print_report(manifest, as_json, room.summary_lines, room.figures_of)


@corpus_app.command("adopt")
def corpus_adopt(
    corpus: Annotated[str, typer.Argument(help="Folder or URL (s3://, hf:// ...) of .jsonl or .parquet files.")],
    text_field: Annotated[str, typer.Option(help="The field or column that holds the text.")] = "content",
    domain: Annotated[str | None, typer.Option(help="One for all files (default: by sub-folder or name).")] = None,
    workers: WorkersOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Write another manifest over the one there.")] = False,
) -> None:
    """Make a folder of raw files a corpus where it lies: counts, hashes and a manifest, nothing copied."""
    from z2all_ds.base.console import human_bytes
    from z2all_ds.corpus import Executor
    from z2all_ds.corpus.adopt import adopt_corpus

    manifest = adopt_corpus(corpus, text_field, domain, Executor(workers), replace=replace)
    for name, (documents, size) in manifest.domains.items():
        shards = sum(shard.domain == name for shard in manifest.shards)
        print(f"{name}: {documents:,} documents, {human_bytes(size)} in {shards} shards")


@corpus_app.command("trace")
def corpus_trace(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    sample: Annotated[list[int] | None, typer.Option(help="Number of a global sample; may be repeated.")] = None,
    step: Annotated[int | None, typer.Option(help="All samples of this step.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which documents, shards and domain a sample of a run came from."""
    from z2all_ds.base.errors import ConfigError
    from z2all_ds.data import step_traces as room

    if not sample and step is None:
        raise ConfigError("corpus trace", "neither a sample nor a step was named", "Give --sample K or --step S.")
    traced = room.trace_run(run, sample or [], step)
    print_report(traced, as_json, lambda found: room.lines_of(found, room.tokenizer_of(run)), room.content_of)
