"""Text of byte-level tokens without cut characters. Used by the standalone check, which cannot import the package."""

from collections.abc import Callable, Sequence

CUT = "\ufffd"
"""What tokenizers decode incomplete characters to."""


def whole_prompt(decode: Callable[[list[int]], str], tokens: Sequence[int], most: int) -> list[int]:
    """Return at most `most` first tokens, fewer if the text would end inside a character."""
    for end in range(min(most, len(tokens)), 0, -1):
        if not decode(list(tokens[:end])).endswith(CUT):
            return list(tokens[:end])
    return list(tokens[:most])


def without_cut_end(text: str) -> str:
    """Return the text without the part of a character that generation ended in."""
    return text.rstrip(CUT)
