"""The control tokens. They follow right after the text vocabulary, in this order, whatever its size.

With 64000 text tokens <|beginoftext|> is 64000 and <|PAD|> is 64006. Appending is safe; any other change of this list
breaks every model trained with it.
"""

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

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    + f"{{{{ '{IM_START}' + message['role'] + '\\n' + message['content'] + '{IM_END}' + '\\n' }}}}"
    + "{% endfor %}"
    + f"{{% if add_generation_prompt %}}{{{{ '{IM_START}assistant\\n' }}}}{{% endif %}}"
)
