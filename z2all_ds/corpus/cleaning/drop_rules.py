"""The dropping steps for one text. Each returns the reason to drop a text, or "".

The limits are fractions of the characters, chosen with a wide margin: an article that quotes a few garbled characters
stays, a page that was decoded with a wrong encoding has them in every line.
"""

import re
import unicodedata
from functools import cache

MAX_GARBLED_SHARE = 0.01
MAX_BLOCK_SHARE = 0.2

# -- garbled text -----------------------------------------------------------------------------------------------------

# Bytes 80 to BF as decoded by Latin-1 (unchanged) and by Windows-1252 (partly these).
_TAIL = "[\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
# By first character: UTF-8 decoded as Latin-1 or Windows-1252 (Ã© for é, â€™ for ’, ä½ å¥½ for 你好, ï¼Œ for ，,
# ðŸ˜€ for an emoji); 锟斤拷, which is U+FFFD in UTF-8 decoded as GBK; 烫 and 屯, memory filled with CC and CD.
# Two-byte characters only for European, Greek and Cyrillic letters, so that CAFÉ» and MENÜ“ do not count.
_GARBLED_BY_START = {
    "\ufffd": "",
    "ÂÃÎÏÐÑ": _TAIL,
    "â": "[€\x80-\x9f‚„ˆ]" + _TAIL,
    "ã-é": _TAIL * 2,
    "ï": "[¼½»¿]" + _TAIL,
    "ð": "[Ÿ\x9f]" + _TAIL * 2,
    "锟": "斤拷",
    "烫": "烫烫+",
    "屯": "屯屯+",
}
# The set of first characters comes first, so that the search skips to the next one: 81 MB/s on European text, 15 with
# plain alternatives.
_GARBLED = re.compile(
    f"[{''.join(_GARBLED_BY_START)}](?:{'|'.join(f'(?<=[{one}]){rest}' for one, rest in _GARBLED_BY_START.items())})"
)
# UTF-8 decoded as GBK: ， 。 的 是 “ 在 我 可 become these, which are very rare in modern Chinese. A single one may be
# a dictionary entry, so three different ones are required.
_UTF8_AS_GBK = re.compile("[锛銆鐨鏄鈥鍦鎴鍙]")
_LATIN_START_UTF8 = b"\xc3"  # first byte of all Latin letters above
_GARBLED_WORDS = ("\ufffd", "锟斤拷", "烫烫烫", "屯屯屯")
# Not the box drawings U+2500 to U+257F, which are the lines of tables: on real Chinese pages with 20 % of them, all 147
# had good text.
_BLOCKS = re.compile("[\u2580-\u259f\u25a0\u25a1\u25ae\u25af\u25fb-\u25fe]+")
_BLOCKS_START_UTF8 = b"\xe2"


def why_garbled(text: str, is_code: bool = False) -> str:
    """Return why the text is garbled, or "". Code may contain drawings of blocks."""
    if text.isascii():
        return ""
    encoded = text.encode("utf-8", "surrogatepass")
    wrong = _chars_decoded_wrongly(text, encoded)
    if wrong > MAX_GARBLED_SHARE * len(text):
        return f"{wrong / len(text):.0%} of the characters were decoded wrongly"
    enough = MAX_BLOCK_SHARE * len(text)
    if not is_code and encoded.count(_BLOCKS_START_UTF8) > enough:
        blocks = sum(len(run) for run in _BLOCKS.findall(text))
        if blocks > enough:
            return f"{blocks / len(text):.0%} of the characters are blocks"
    return ""


def _chars_decoded_wrongly(text: str, encoded: bytes) -> int:
    wrong = 0
    # Searching for one byte or one word first: 62 -> 142 MB/s on Chinese.
    if _LATIN_START_UTF8 in encoded or any(word in text for word in _GARBLED_WORDS):
        wrong += sum(len(match) for match in _GARBLED.findall(text))
    if ("锛" in text or "銆" in text) and len(set(signs := _UTF8_AS_GBK.findall(text))) >= 3:
        wrong += len(signs)
    return wrong


# -- length -----------------------------------------------------------------------------------------------------------


def why_too_short(text: str, min_chars: int) -> str:
    chars = len(text.strip())
    return f"{chars} characters, fewer than {min_chars}" if chars < min_chars else ""


def why_too_long(text: str, max_chars: int) -> str:
    if len(text) <= max_chars or (chars := len(text.strip())) <= max_chars:
        return ""
    return f"{chars} characters, more than {max_chars}"


# -- symbols ----------------------------------------------------------------------------------------------------------

_ASCII_SYMBOLS = b"$+<=>^`|~" + bytes([*range(9), *range(14, 28), 127])
# Bytes that are neither an ASCII symbol nor the first byte of another symbol: the rest of ASCII, continuation bytes (80
# to BF), first bytes of most of Han and of Hangul.
_BYTES_OF_NO_SYMBOL = bytes(sorted({*range(0xC2), *range(0xE4, 0xEA), *range(0xEB, 0xEE)} - set(_ASCII_SYMBOLS)))


def why_symbols(text: str, max_share: float, is_code: bool = False) -> str:
    """Return why the text has too many symbols: characters other than letters, digits, whitespace and punctuation."""
    encoded, enough = text.encode("utf-8", "surrogatepass"), max_share * len(text)
    # An upper bound first: it decides nearly all texts without a search over characters.
    if len(encoded.translate(None, _BYTES_OF_NO_SYMBOL)) <= enough:
        return ""
    symbols = 0 if is_code else len(encoded) - len(encoded.translate(None, _ASCII_SYMBOLS))
    if len(encoded) > len(text):
        symbols += sum(len(run) for run in _symbols_beyond_ascii().findall(text))
    return f"{symbols / len(text):.0%} symbols" if symbols > enough else ""


@cache
def _symbols_beyond_ascii() -> re.Pattern[str]:
    """Match symbols (S*), controls and private use characters, but not unassigned code points, which the next Unicode
    version may make letters, not the hexagrams within the Han range, and not box drawings, the lines of tables."""
    found = [chr(code) for code in range(0x80, 0xFFFE) if unicodedata.category(chr(code)) in _SYMBOL_CATEGORIES]
    kept = [char for char in found if not ("\u4dc0" <= char <= "\u4dff" or "\u2500" <= char <= "\u257f")]
    basic = "".join(map(re.escape, kept))
    # Music, emoji and pictures, private use as whole blocks, because a search tries each range in turn.
    return re.compile(f"[{basic}\U0001d000-\U0001d24f\U0001f000-\U0001fbef\U000f0000-\U0010ffff]+")


_SYMBOL_CATEGORIES = {"Sm", "Sc", "Sk", "So", "Cc", "Co"}
