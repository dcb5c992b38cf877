"""Prompts for a model: plain text to continue, or messages in the tokenizer's chat template.

Every tokenizer trained by this package has a template, long before its model has learned to chat. So that template is
used only on request; the template of any other model is used unless disabled.
"""

from typing import Any

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.schema import has_lone_surrogate
from z2all_ds.evaluate.windows import AUTO, bos_id_of
from z2all_ds.tokenizer.special_tokens import CHAT_TEMPLATE

Message = dict[str, str]
_PROBE_ANSWER = "an answer that no template knows"


def is_chat(tokenizer: Any, asked: bool | None) -> bool:
    """Return whether prompts are messages. `asked`: None lets the tokenizer decide."""
    template = getattr(tokenizer, "chat_template", None)
    if asked and not template:
        raise ConfigError("--chat", "the tokenizer has no chat template", "Omit it.")
    return bool(template) and template != CHAT_TEMPLATE if asked is None else asked


def require_characters(text: str, where: str) -> None:
    """Refuse lone surrogates. They come from invalid UTF-8 on a command line or terminal, or from JSON escapes; no
    tokenizer accepts them, and no file can be written with them."""
    if has_lone_surrogate(text):
        raise DataError(where, "not UTF-8, or half a surrogate pair", "Use valid Unicode.")


def plain_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Encode with a begin-of-text token if the tokenizer adds one by default; never with an end token."""
    if not prompt:
        raise ConfigError("an empty prompt", "must have at least one character", "Enter text to continue.")
    require_characters(prompt, "a prompt")
    ids: list[int] = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    bos_id = bos_id_of(tokenizer, AUTO)
    return ids if bos_id is None else [bos_id, *ids]


def chat_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Return the ids of the conversation so far and the beginning of the answer."""
    text = _rendered(tokenizer, messages, add_generation_prompt=True)
    require_characters(text, "a message")
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False)
    ids: list[int] = encoded["input_ids"]
    return ids


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the control token that the template puts after an answer; it ends an answer whatever the config says."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE_ANSWER}]
    try:
        _, found, behind = _rendered(tokenizer, messages, add_generation_prompt=False).rpartition(_PROBE_ANSWER)
    except ConfigError:
        return None
    ids = tokenizer(behind, add_special_tokens=False, split_special_tokens=False)["input_ids"] if found else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def _rendered(tokenizer: Any, messages: list[Message], add_generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise ConfigError("the chat template", f"rejects this conversation ({error})", "Change it.") from error
    return text
