"""Interactive loop on a terminal: reads a line, streams an answer."""

import sys
from contextlib import suppress

from z2all_ds.base.console import fit_for_stdout, say
from z2all_ds.base.errors import Z2allError
from z2all_ds.evaluate.generate import Generator
from z2all_ds.evaluate.prompts import Message, chat_ids, explain_blanks

EXIT, NEW = "/exit", "/new"


def converse(generator: Generator) -> None:
    """Run until /exit or Ctrl-D. Ctrl-C ends the current answer; its text so far stays in the conversation."""
    import readline  # noqa: F401 - adds editing and history to `input`

    mode = "a conversation (/new starts over)" if generator.is_chat else "each line is continued on its own"
    say(f"{generator.loaded.label}: {mode}; {EXIT} or Ctrl-D ends, Ctrl-C stops an answer")
    messages: list[Message] | None = []
    while messages is not None:
        # Around the whole turn: a Ctrl-C during typing may be raised only after the line was read.
        try:
            messages = _turn(generator, messages)
        except KeyboardInterrupt:
            print()


def _turn(generator: Generator, messages: list[Message]) -> list[Message] | None:
    """Return the conversation after one more line; None at its end."""
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None
    if line == EXIT:
        return None
    if line == NEW:
        return []
    if line:
        try:
            return _answer(generator, messages, line)
        except Z2allError as error:
            say(f"{error}" + (f" Or start over with {NEW}." if messages else ""))
    return messages


def _answer(generator: Generator, messages: list[Message], line: str) -> list[Message]:
    """Return the conversation with the new answer."""
    asked = [*messages, {"role": "user", "content": line}] if messages else generator.conversation(line)
    if generator.is_chat:
        ids = chat_ids(generator.loaded.tokenizer, asked, generator.control_tokens)
    else:
        ids = generator.ids_of(line)
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        write_now(piece)

    answers = []
    with suppress(KeyboardInterrupt):
        answers.append(generator.stream(line, write, ids))
    print(flush=True)
    explain_blanks(answers)
    return [*asked, {"role": "assistant", "content": "".join(pieces)}] if generator.is_chat else []


def write_now(text: str) -> None:
    sys.stdout.write(fit_for_stdout(text))
    sys.stdout.flush()
