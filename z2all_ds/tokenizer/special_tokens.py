"""The control tokens, which follow the text vocabulary in this order.

With 64000 text tokens, <|beginoftext|> is 64000 and <|PAD|> is 64006. New tokens may be appended; any other change of
this list breaks every model trained with it.
"""

from z2all_ds.base.vocabulary_rows import rounded_rows

BEGIN_OF_TEXT = "<|beginoftext|>"
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
UNKNOWN = "<|UNK|>"
PAD = "<|PAD|>"

SPECIAL_TOKENS: tuple[str, ...] = (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    "<|endofprompt|>",
    IM_START,
    IM_END,
    UNKNOWN,
    PAD,
    "<|CLS|>",
    "<|SEP|>",
    "<|MASK|>",
    "<|BOS|>",
    "<|EOS|>",
)

ROLES = {"bos_token": BEGIN_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PAD, "unk_token": UNKNOWN}
"""Their names in transformers."""

# transformers tokenizes a rendered chat as one string and cannot tell the template's control tokens from those in a
# message, so the template refuses a message that contains one.
_REFUSAL = (
    "{% for token in ["
    + ", ".join(f"'{token}'" for token in SPECIAL_TOKENS)
    + "] %}{% if token in message['role'] or token in message['content'] %}"
    + "{{ raise_exception('a message must not contain the control token ' + token) }}"
    + "{% endif %}{% endfor %}"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    + _REFUSAL
    + f"{{{{ '{IM_START}' + message['role'] + '\\n' + message['content'] + '{IM_END}' + '\\n' }}}}"
    + "{% endfor %}"
    + f"{{% if add_generation_prompt %}}{{{{ '{IM_START}assistant\\n' }}}}{{% endif %}}"
)

SPARE_ROWS = 256
"""Embedding rows reserved for future control tokens (tools, images, languages)."""


def padded_vocabulary(size: int) -> int:
    """Return the embedding rows for `size` ids: at least 256 spare rows, and a multiple of 64. 64012 -> 64320."""
    return rounded_rows(size + SPARE_ROWS)
