"""Prompts as a model wants them: plain text to go on from, or messages in the tokenizer's chat template.

Every tokenizer that is trained here carries a template from birth, long before a model has learned to chat. So that
template is used when asked for; one that came with a model from elsewhere is used unless forbidden.
"""

from typing import Any

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.schema import has_lone_surrogate
from z2all_ds.evaluate.windows import AUTO, bos_id_of
from z2all_ds.tokenizer.special_tokens import CHAT_TEMPLATE

Message = dict[str, str]
_PROBE_ANSWER = "an answer that no template knows"


def is_chat(tokenizer: Any, asked: bool | None) -> bool:
    """Whether prompts are messages. `asked`: None to let the tokenizer decide."""
    template = getattr(tokenizer, "chat_template", None)
    if asked and not template:
        raise ConfigError("--chat", "the tokenizer has no chat template", "Leave it out.")
    return bool(template) and template != CHAT_TEMPLATE if asked is None else asked


def require_characters(text: str, where: str) -> None:
    """Bytes that are no UTF-8 come from a command line or a terminal as halves of surrogate pairs; JSON can spell them
    out. No tokenizer takes one, and no file could be written with one."""
    if has_lone_surrogate(text):
        raise DataError(where, "not UTF-8, or half a surrogate pair", "Give valid Unicode.")


def plain_ids(tokenizer: Any, prompt: str) -> list[int]:
    """With a begin-of-text token where the tokenizer adds one by itself; never with one for the end."""
    if not prompt:
        raise ConfigError("an empty prompt", "must hold at least one character", "Give something to continue.")
    require_characters(prompt, "a prompt")
    ids: list[int] = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    bos_id = bos_id_of(tokenizer, AUTO)
    return ids if bos_id is None else [bos_id, *ids]


def chat_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """The conversation so far, and the beginning of the answer."""
    text = _rendered(tokenizer, messages, add_generation_prompt=True)
    require_characters(text, "a message")
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False)
    ids: list[int] = encoded["input_ids"]
    return ids


def end_of_turn(tokenizer: Any) -> int | None:
    """The control token that the template puts behind an answer: it ends one, whatever the model's config says."""
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
        raise ConfigError("the chat template", f"refuses this conversation ({error})", "Change it.") from error
    return text
