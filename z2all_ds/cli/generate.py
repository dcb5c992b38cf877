"""The verb `z2all generate`: continue prompts or answer messages, once, from a file, or interactively."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from z2all_ds.base.errors import ConfigError, Z2allError
from z2all_ds.base.reports import print_lines, to_json
from z2all_ds.cli.evaluate import DtypeOption, ModelArgument
from z2all_ds.cli.options import JsonOption

if TYPE_CHECKING:
    from z2all_ds.evaluate.generate import Generator


def generate(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Prompt; may be repeated.")] = None,
    file: Annotated[
        str | None, typer.Option(help='File with one prompt per line (-: stdin), or .jsonl with a "prompt" field.')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the answers to this new .jsonl file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens per answer.")] = 64,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy (default: 0, or 1 if another sampling option is given).")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens with this total probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the K most likely tokens; 0: from all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Minimum probability, relative to the most likely token.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most likely token.")] = False,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeated tokens become less likely.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End an answer before this text; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    num: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Answers per batch.")] = 8,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Treat prompts as chat messages (default: if the model came with a chat template; the template of "
            "tokenizers trained here is used only with --chat).",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of a chat.")] = None,
    control_tokens: Annotated[
        bool, typer.Option("--control-tokens", help="Parse control tokens in prompts; by default they are plain text.")
    ] = False,
    stream: Annotated[
        bool | None, typer.Option(help="Stream the output (default: for one prompt at a terminal).")
    ] = None,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Continue prompts from -p, a file or a pipe, or start an interactive session if there are none."""
    from z2all_ds.evaluate.generate import Generator, Sampling
    from z2all_ds.evaluate.loading import is_hf_folder, load_model

    options = {"--top-p": top_p, "--top-k": top_k, "--min-p": min_p, "--num above 1": num if num > 1 else None}
    sampling = Sampling(
        max_new_tokens,
        _temperature(temperature, greedy, options),
        1.0 if top_p is None else top_p,
        top_k or 0,
        min_p or 0.0,
        repetition_penalty,
        tuple(stop or ()),
        seed,
    )
    if stream and (as_json or out):
        raise ConfigError("--stream", "streams text, not JSON", "Leave out --stream, or --json and --out.")
    is_hf_folder(model)  # a wrong name is reported before prompts are read
    records = _records(prompt, file)
    if records is None and (as_json or out or num > 1):
        raise ConfigError("--json, --out or --num", "needs prompts, and there are none", "Give -p or --file.")
    if out:
        from z2all_ds.base.outputs import require_writable

        require_writable(out)
    generator = Generator(load_model(model, dtype), sampling, chat, system, control_tokens)
    if records is None:
        from z2all_ds.evaluate.converse import converse

        converse(generator)
        return
    one_at_a_terminal = len(records) == num == 1 and sys.stdout.isatty() and not as_json and not out
    if one_at_a_terminal if stream is None else stream:
        _stream(generator, records, num)
        return
    _answer_all(generator, records, batch, num, out, as_json)


def _temperature(temperature: float | None, greedy: bool, sampling_options: dict[str, Any]) -> float:
    """Return the temperature: by default 0, or 1 if a sampling option is set. Refuse sampling with greedy."""
    used = [name for name, value in sampling_options.items() if value is not None]
    if greedy and temperature:
        used.append("--temperature")
    if used and (greedy or temperature == 0):
        choice = "--greedy" if greedy else "--temperature 0"
        raise ConfigError(
            f"{choice} with {', '.join(used)}", "greedy decoding does not sample", "Leave out one of them."
        )
    return temperature if temperature is not None else 1.0 if used else 0.0


def _records(prompts: list[str] | None, file: str | None) -> list[dict[str, Any]] | None:
    """Return the prompts as records, or None for an interactive session."""
    from z2all_ds.evaluate.prompts import read_prompts, read_stdin, require_unicode

    if prompts and file:
        raise ConfigError("-p and --file", "cannot be combined", "Give one of them.")
    if file:
        return read_prompts(file)
    if not prompts and sys.stdin.isatty():
        return None
    if not prompts:
        prompts = [read_stdin().removesuffix("\n")]
        if not prompts[0]:
            raise ConfigError("stdin", "is empty, and no prompt was given", "Give -p or --file, or pipe text in.")
    if not all(prompts):
        raise ConfigError("-p ''", "a prompt must have at least one character", "Give text to continue.")
    for one in prompts:
        require_unicode(one, "a prompt")
    return [{"prompt": one} for one in prompts]


def _stream(generator: "Generator", records: list[dict[str, Any]], num: int) -> None:
    from z2all_ds.evaluate.converse import write_now
    from z2all_ds.evaluate.prompts import explain_blanks

    for record in records:
        for _ in range(num):
            if not generator.is_chat:
                write_now(record["prompt"])
            answer = generator.stream(record["prompt"], write_now)
            write_now("\n")
            explain_blanks([answer])


def _answer_all(
    generator: "Generator", records: list[dict[str, Any]], batch: int, num: int, out: Path | None, as_json: bool
) -> None:
    from z2all_ds.base.console import fit_for_stdout, progress
    from z2all_ds.base.outputs import write_output
    from z2all_ds.evaluate.prompts import explain_blanks, with_answers

    answers = []
    with progress("generate", len(records) * num, "answers") as advance:
        for answer in generator.answer_all([record["prompt"] for record in records], batch, num):
            answers.append(answer)
            advance(1)
    if out:
        lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in with_answers(records, answers, num)]
        try:
            write_output(out, "".join(lines))
        except Z2allError:  # a full disk does not take the answers away
            print("".join(lines), end="")
            raise
    if as_json:
        print(to_json(with_answers(records, answers, num)))
    elif out:
        print_lines([str(out)])
    else:
        for answer in answers:
            print(fit_for_stdout(answer.text if generator.is_chat else answer.prompt + answer.text))
        explain_blanks(answers)
