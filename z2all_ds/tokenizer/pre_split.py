"""How text is cut before merging. No token crosses a cut, so this decides what a token can be.

It also decides what training costs. A Chinese sentence has no spaces; uncut, each sentence is a "word" of its own and
the table of words grows with the corpus. PRE_SPLIT cuts such runs into short pieces, so words repeat.
"""

_CJK = r"\p{Han}\p{Hiragana}\p{Katakana}"

PRE_SPLIT = "|".join(
    [
        rf"[{_CJK}]{{1,4}}",  # most Chinese words have one to four characters
        r"\p{N}{1,3}",  # numbers in groups, so that 2024 is not a word of its own
        # A word with the one sign before it (" word", "_name", ".join"). The bound is for scripts without spaces
        # other than CJK (Thai, Khmer) and for base64.
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_CJK}]]{{1,24}}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the line end they close
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # indentation, less the one space that goes with the next word
        r"\s+",
    ]
)
"""For an engine with \\p{...} and && (Oniguruma in `tokenizers`, fancy-regex); Python's `re` has neither."""
