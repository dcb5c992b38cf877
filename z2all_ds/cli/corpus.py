"""The subcommands of `z2all corpus`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from z2all_ds.base.console import say
from z2all_ds.base.reports import print_lines, print_report
from z2all_ds.cli.options import FollowLinksOption, JsonOption, WorkersOption, refuse_without_effect
from z2all_ds.cli.verbs import Verbs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from z2all_ds.corpus import SourceSpec

corpus_app = Verbs(no_args_is_help=True, help="Convert raw text to clean shards with a manifest.")

CorpusArgument = Annotated[Path, typer.Argument(help="Corpus folder.")]
OutOption = Annotated[Path, typer.Option(help="Output corpus folder.")]
MaxBytesOption = Annotated[int | None, typer.Option(help="Maximum bytes per domain.")]
CleanOption = Annotated[
    list[str] | None,
    typer.Option("--clean", help="Cleaning step, e.g. control_characters, min_chars=20, or all; may be repeated."),
]
OnErrorOption = Annotated[str, typer.Option(help="What to do with invalid rows: stop or skip.")]
BadShareOption = Annotated[
    float, typer.Option(help="With --on-error skip: fail if more than this fraction of rows is invalid.")
]
ReplaceOption = Annotated[
    bool, typer.Option("--replace", help="Overwrite a corpus that was built from different inputs.")
]
RayOption = Annotated[str | None, typer.Option(help="Address of a Ray cluster to run on; `local` starts one here.")]
CodeOption = Annotated[bool, typer.Option("--code", help="The texts are code: cleaning does not alter them.")]
ComposeOption = Annotated[
    str, typer.Option(help=r"Compose the content from several fields, e.g. '{title}\n{content}'.")
]
PluginOption = Annotated[Path | None, typer.Option(help="Python file that registers more converters.")]


@corpus_app.command("convert")
def corpus_convert(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Converter name, see `corpus sources`.")],
    raw: Annotated[
        list[str], typer.Argument(help="Raw files, folders or patterns; also .gz, .bz2, .zst, .zip and .tar.*.")
    ],
    out: OutOption,
    domain: Annotated[str | None, typer.Option(help="Domain name (default: the source's).")] = None,
    form: Annotated[
        str, typer.Option(help="Format if the converter sets none: jsonl, json_array, parquet, txt or lines.")
    ] = "",
    fields: Annotated[str, typer.Option(help="For the generic converter: content=RAW_FIELD,title=RAW_FIELD...")] = "",
    compose: ComposeOption = "",
    clean: CleanOption = None,
    code: CodeOption = False,
    on_error: OnErrorOption = "stop",
    max_bad_share: BadShareOption = 0.01,
    max_bytes: MaxBytesOption = None,
    max_record_bytes: Annotated[int, typer.Option(help="Longer rows are invalid.")] = 64 * 2**20,
    max_expansion: Annotated[float, typer.Option(help="Refuse archives that expand more than N times.")] = 200.0,
    workers: WorkersOption = None,
    ray: RayOption = None,
    plugin: PluginOption = None,
    follow_links: FollowLinksOption = False,
    replace: ReplaceOption = False,
) -> None:
    """Add one source to a corpus: convert its raw files, clean them, and write shards."""
    from z2all_ds.base.paths import expanded
    from z2all_ds.corpus import Executor, SourceSpec, build_corpus
    from z2all_ds.corpus.cleaning import CleaningRules
    from z2all_ds.corpus.converters import parse_field_map
    from z2all_ds.corpus.forms import ReadLimits

    _refuse_bad_share(context, on_error)
    spec = SourceSpec(
        domain or source,
        source,
        tuple(expanded(path) for path in raw),
        max_bytes,
        form,
        tuple(parse_field_map(fields).items()) if fields else (),
        compose.replace("\\n", "\n"),
        CleaningRules.parse(clean or []),
        on_error,
        max_bad_share,
        ReadLimits(max_record_bytes=max_record_bytes, max_expansion=max_expansion),
        plugin,
        follow_links,
        code,
    )
    build_corpus(out, [spec], replace=replace, add=True, executor=Executor(workers, ray))
    _print_summary(out, [spec])


@corpus_app.command("build")
def corpus_build(
    context: typer.Context,
    sources: Annotated[list[str], typer.Argument(help="DOMAIN=CONVERTER[:PATH,PATH...], see `corpus sources`.")],
    out: OutOption,
    max_bytes: MaxBytesOption = None,
    compose: ComposeOption = "",
    clean: CleanOption = None,
    code: CodeOption = False,
    on_error: OnErrorOption = "stop",
    max_bad_share: BadShareOption = 0.01,
    workers: WorkersOption = None,
    ray: RayOption = None,
    plugin: PluginOption = None,
    follow_links: FollowLinksOption = False,
    replace: ReplaceOption = False,
) -> None:
    """Build a corpus from one or more sources."""
    from z2all_ds.base.errors import ConfigError
    from z2all_ds.base.paths import expanded
    from z2all_ds.corpus import Executor, SourceSpec, build_corpus
    from z2all_ds.corpus.cleaning import CleaningRules

    _refuse_bad_share(context, on_error)
    settings: dict[str, Any] = {
        "compose": compose.replace("\\n", "\n"),
        "cleaning": CleaningRules.parse(clean or []),
        "on_error": on_error,
        "max_bad_share": max_bad_share,
        "plugin": plugin,
        "follow_links": follow_links,
        "is_code": code,
    }
    specs = []
    for text in sources:
        domain, equals, rest = text.partition("=")
        converter, _, paths = rest.partition(":")
        if not equals or not converter:
            rule = "must have the form DOMAIN=CONVERTER[:PATH,...]"
            raise ConfigError(f"source {text!r}", rule, "E.g. code=python_code.")
        raw = tuple(expanded(p) for p in paths.split(",") if p)
        specs.append(SourceSpec(domain, converter, raw, max_bytes, **settings))
    build_corpus(out, specs, replace=replace, executor=Executor(workers, ray))
    _print_summary(out, specs)


def _refuse_bad_share(context: typer.Context, on_error: str) -> None:
    if on_error != "skip":
        refuse_without_effect(context, ["max_bad_share"], "the first invalid row stops, without --on-error skip")


def _print_summary(out: Path, specs: "Sequence[SourceSpec]") -> None:
    from z2all_ds.corpus.building.report import read_report, summary_lines

    for spec in specs:
        print_lines(summary_lines(read_report(out, spec.domain)))


@corpus_app.command("report")
def corpus_report(corpus: CorpusArgument, as_json: JsonOption = False) -> None:
    """Show what the build counted: invalid rows with their locations, and the effect of each cleaning step."""
    from z2all_ds.corpus import load_manifest
    from z2all_ds.corpus.building.report import full_lines, read_report

    reports = {domain: read_report(corpus, domain) for domain in load_manifest(corpus).domains}
    print_report(reports, as_json, lambda found: (line for one in found.values() for line in full_lines(one)))


@corpus_app.command("sources")
def corpus_sources(plugin: PluginOption = None) -> None:
    """List the converters."""
    from z2all_ds.corpus.converters import describe_converters, load_plugin

    if plugin is not None:
        load_plugin(plugin)
    print_lines(f"{name:20} {purpose}" for name, purpose in describe_converters().items())


@corpus_app.command("audit")
def corpus_audit(corpus: CorpusArgument, workers: WorkersOption = None) -> None:
    """Check every shard and record against the manifest: hashes, schema, ids, encoding."""
    from z2all_ds.base.errors import DataError
    from z2all_ds.corpus import audit_corpus

    report = audit_corpus(corpus, workers)
    print_lines([*report.problems, *(f"warning: {warning}" for warning in report.warnings)])
    if not report.ok:
        raise DataError(f"corpus {corpus}", f"{len(report.problems)} problems", report.fix)
    print_lines([f"{corpus}: {report.documents:,} documents in {report.shards} shards, no problems found"])


@corpus_app.command("stats")
def corpus_stats(
    corpus: CorpusArgument,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder, to count tokens.")] = None,
    sample: Annotated[float, typer.Option(help="Read only this fraction of the text and extrapolate.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Plot the document lengths to this .png or .svg.")] = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show documents, bytes, lengths and tokens of each domain."""
    from z2all_ds.base.outputs import check_plot
    from z2all_ds.data import corpus_stats as impl

    if plot is not None:  # before the corpus is read
        check_plot(plot, "--plot")
    found = impl.corpus_stats(corpus, tokenizer, workers, sample)
    print_report(found, as_json, impl.describe)
    if plot is not None:
        (say if as_json else print)(f"{impl.draw_lengths(found, plot)}")


@corpus_app.command("sample")
def corpus_sample(
    context: typer.Context,
    corpus: CorpusArgument,
    count: Annotated[int, typer.Option("--count", "-n", help="Number of documents.")] = 3,
    domain: Annotated[str | None, typer.Option(help="Only from this domain.")] = None,
    gid: Annotated[int | None, typer.Option(help="Show the document with this gid.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the selection.")] = 0,
    max_chars: Annotated[int, typer.Option(min=0, help="Characters to show per document.")] = 1000,
) -> None:
    """Print some documents."""
    from z2all_ds.corpus import sample as impl

    if gid is not None:
        refuse_without_effect(context, ["count", "domain", "seed"], "--gid names the document")
    documents = impl.sample_documents(corpus, count, domain, seed) if gid is None else [impl.find_document(corpus, gid)]
    print_lines(impl.describe(documents, max_chars))


@corpus_app.command("split")
def corpus_split(
    corpus: CorpusArgument,
    out: Annotated[Path, typer.Option(help="Output folder for the two corpora, train and validation.")],
    share: Annotated[float, typer.Option(help="Fraction of the documents for validation.")] = 0.001,
    seed: Annotated[str, typer.Option(help="Seed of the selection.")] = "",
    workers: WorkersOption = None,
) -> None:
    """Split off documents for validation by a hash of their text: the choice is stable when the corpus grows."""
    from z2all_ds.corpus.split import split_corpus

    report = split_corpus(corpus, out, share, seed, workers)
    for domain, (documents, size) in report.train.items():
        held_out = report.validation.get(domain, (0, 0))
        validation = f"validation {held_out[0]:,}, {held_out[1]:,} bytes"
        print_lines([f"{domain}: train {documents:,} documents, {size:,} bytes; {validation}"])
    print_lines(f"warning: {warning}" for warning in report.warnings)


@corpus_app.command("tokenize")
def corpus_tokenize(
    corpus: Annotated[str, typer.Argument(help="Corpus folder or URL.")],
    tokenizer: Annotated[Path, typer.Option(help="Tokenizer folder.")],
    out: Annotated[Path, typer.Option(help="Output folder for the tokens.")],
    on_bad_record: Annotated[str, typer.Option(help="stop, or skip: a record without a text is empty.")] = "stop",
    workers: WorkersOption = None,
    replace: ReplaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tokenize a corpus once; training then reads tokens. A run that began on text keeps its samples."""
    from z2all_ds.data.tokens import tokenizing as impl

    manifest = impl.tokenize_corpus(corpus, tokenizer, out, workers, replace, on_bad_record)
    print_report(manifest, as_json, impl.describe, impl.figures_of)


@corpus_app.command("adopt")
def corpus_adopt(
    corpus: Annotated[str, typer.Argument(help="Folder or URL (s3://, hf:// ...) of .jsonl or .parquet files.")],
    text_field: Annotated[
        str | None,
        typer.Option(help="Field or column that contains the text (default: guessed, e.g. content)."),
    ] = None,
    domain: Annotated[
        str | None, typer.Option(help="One domain for all files (default: by subfolder or file name).")
    ] = None,
    on_error: Annotated[str, typer.Option(help="What to do with records without a valid text: stop or skip.")] = "stop",
    workers: WorkersOption = None,
    follow_links: FollowLinksOption = False,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite an existing manifest.")] = False,
) -> None:
    """Turn a folder of files into a corpus in place: counts, hashes and a manifest; nothing is copied."""
    from z2all_ds.base.console import human_bytes
    from z2all_ds.corpus import Executor
    from z2all_ds.corpus.adopt import adopt_corpus

    manifest = adopt_corpus(
        corpus,
        text_field,
        domain,
        Executor(workers),
        replace=replace,
        on_error=on_error,
        follow_links=follow_links,
    )
    for name, (documents, size) in manifest.domains.items():
        shards = sum(shard.domain == name for shard in manifest.shards)
        print_lines([f"{name}: {documents:,} documents, {human_bytes(size)} in {shards} shards"])


@corpus_app.command("trace")
def corpus_trace(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    sample: Annotated[list[int] | None, typer.Option(help="Global sample number; may be repeated.")] = None,
    step: Annotated[int | None, typer.Option(help="All samples of this step.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which documents, shards and domain a sample of a run came from; without one, how often each domain was read
    up to the last checkpoint."""
    from z2all_ds.data import trace as impl

    if not sample and step is None:
        print_report(impl.coverage_of_run(run), as_json, impl.describe_coverage)
        return
    traced = impl.trace_run(run, sample or [], step)
    print_report(traced, as_json, lambda found: impl.describe(found, impl.tokenizer_of(run)))
