"""The altering steps: idempotent functions from text to text.

Their chain in the order of `CleaningRules` is idempotent too. This depends on the order: removing spaces can make a
longer run of marks (。。 。。), while shortening a run never makes a space or a control character.

An unchanged text is returned as the same object, so that the caller detects it cheaply.
"""

import re

# -- control characters -----------------------------------------------------------------------------------------------

# Whole sequences of terminals. No part matches ESC except at its ends, which makes the search linear in time.
_TERMINAL_SEQUENCES = re.compile(
    # Colours and cursor moves (CSI). U+009B needs a parameter: it may also be a › that was decoded wrongly.
    "(?:\x1b\\[|\x9b(?=[0-?]))[0-?]*[ -/]*[@-~]"
    # Titles and links (OSC); the limit keeps the text after a sequence that was cut off.
    "|\x1b\\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\\\)"
    # Images and other strings (DCS, SOS, PM, APC), and the titles of screen.
    "|\x1b[PX^_k][^\x1b\n]*\x1b\\\\"
    # Character sets, modes, and the beginning of sequences that were cut off.
    "|\x1b[ -/]*[0-~]"
)
_OTHER_LINE_BREAKS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
# C0 without tab and line breaks, C1, soft hyphen, direction marks, zero-width, private use, noncharacters, U+FEFF.
_GO_ALWAYS = (
    "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    "\ue000-\uf8ff\ufdd0-\ufdef\ufeff\ufffe\uffff\U000f0000-\U0010ffff"
)
_JOINERS = "\u200c\u200d"
_TAGS = "\U000e0000-\U000e007f"
_ANY_CONTROL = re.compile(f"[{_GO_ALWAYS}\r\x0b\x0c\x85\u2028\u2029{_JOINERS}{_TAGS}]")
_CONTROLS = re.compile(f"[{_GO_ALWAYS}]+")
# All controls of ASCII: deleting bytes is far faster than a search over characters.
_ASCII_CONTROLS = bytes([*range(9), *range(11, 32), 127])

# A region flag (England, Wales) is a black flag followed by tags; other tags are invisible text.
_FLAGS_AND_TAGS = re.compile(f"(\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f)|[{_TAGS}]+")

# Scripts in which a joiner after a letter is part of the spelling: Arabic to N'Ko, Indic, South-East Asian, Mongolian,
# Arabic presentation forms. The next character does not matter: Malayalam and Kannada words can end in a joiner.
_JOINING_SCRIPTS = re.compile(
    "[\u0600-\u0dff\u0f00-\u109f\u1780-\u18af\u1900-\u1bff\ua800-\uabff\ufb50-\ufdcf\ufdf0-\ufdff\ufe70-\ufefc]"
)
_EMOJI = re.compile("[\u2190-\u23ff\u2600-\u27bf\u2b00-\u2bff\ufe0e\ufe0f\U0001f000-\U0001faff\U000e007f]")
_JOINER_RUN = re.compile(f"[{_JOINERS}]+")


def control_characters(text: str) -> str:
    """Remove invisible characters and terminal sequences, and unify line breaks; `CleaningRules` has the list."""
    if text.isascii():
        if len(text.encode("ascii").translate(None, _ASCII_CONTROLS)) == len(text):
            return text
    elif not _ANY_CONTROL.search(text):
        return text
    cleaned = _TERMINAL_SEQUENCES.sub("", text) if "\x1b" in text or "\x9b" in text else text
    cleaned = _CONTROLS.sub("", cleaned)
    if not cleaned.isascii():
        # Tags before joiners: a joiner may follow the last tag of a flag, and tags after a joiner are not a flag.
        cleaned = _FLAGS_AND_TAGS.sub(lambda match: match[1] or "", cleaned)
        cleaned = _JOINER_RUN.sub(_keep_joiner, cleaned)
    # Last: \r and \n with only invisible characters between them are one line break.
    cleaned = _OTHER_LINE_BREAKS.sub("\n", cleaned)
    return text if cleaned == text else cleaned


def _keep_joiner(match: re.Match[str]) -> str:
    """Return the joiner that stays of a run, or "", depending on the visible characters on both sides."""
    text, before = match.string, match.start() - 1
    if before < 0:
        return ""
    if _JOINING_SCRIPTS.match(text, before):
        return match[0][0]
    if "\u200d" in match[0] and _EMOJI.match(text, before) and _EMOJI.match(text, match.end()):
        return "\u200d"
    return ""


# -- spaces in CJK text -----------------------------------------------------------------------------------------------

# Tabs are columns and stay. Hangul is not included: Korean has spaces between words.
_BLANKS = " \xa0\u2000-\u200a\u202f\u205f\u3000"
_LETTERS_CJK = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f\u31a0-\u31bf"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_OPENING_CJK = "\u3008\u300a\u300c\u300e\u3010\u3014\u3016\u3018\u301a\u301d\uff08\uff3b\uff5b\uff5f\uff62"
# Quotes “” and dashes are not included: Latin text has them too, after a space.
_CLOSING_CJK = (
    "\u3001-\u3003\u3009\u300b\u300d\u300f\u3011\u3015\u3017\u3019\u301b\u301e\u301f\u30fb\uff01\uff0c\uff0e"
    "\uff1a\uff1b\uff1f\uff09\uff3d\uff5d\uff5e\uff60\uff61\uff63-\uff65\ufe10-\ufe16\ufe30\ufe50-\ufe57"
)
_CJK = _LETTERS_CJK + _OPENING_CJK + _CLOSING_CJK
# The lookbehinds match a run only from its start; without them a megabyte of spaces takes hours. They come after the
# first space, so that the search skips from space to space: 24 -> 61 MB/s on Chinese.
_CJK_BLANKS = re.compile(
    f"[{_BLANKS}](?:(?<=[{_CJK}][{_BLANKS}])[{_BLANKS}]*(?=[{_CJK}])|(?<=\\S[{_BLANKS}])[{_BLANKS}]*(?=[{_CLOSING_CJK}]))"
)
# First bytes of characters below U+3000, of the scripts after Han (with Hangul), and of planes above 3.
_UTF8_NOT_CJK = bytes([*range(0xE3), *range(0xEA, 0xEF), *range(0xF1, 0x100)])


def has_cjk_bytes(text: str) -> bool:
    """Return whether the text may contain a CJK character. Testing UTF-8 first bytes is faster than a regex."""
    if text.isascii():
        return False
    if "。" in text or "的" in text:  # in nearly all Chinese
        return True
    return bool(text.encode("utf-8", "surrogatepass").translate(None, _UTF8_NOT_CJK))


def space_before_cjk(text: str) -> str:
    """Remove spaces between two CJK characters, and before CJK punctuation that ends or separates.

    A space stays before an opening bracket after a Latin word (`Python 《手册》`), and between Latin and CJK words.
    """
    if not has_cjk_bytes(text):
        return text
    cleaned = _CJK_BLANKS.sub("", text)
    return text if len(cleaned) == len(text) else cleaned


# -- repeated punctuation ---------------------------------------------------------------------------------------------

# Not included, because four and more of them have a meaning: brackets (nesting), quotes and backslashes (escapes),
# slashes and colons (paths, fences), - = _ * # + (rules, tables, headings, gaps to fill in).
_ENDING = "!?.,;·•・。，、；！？．～〜｡､﹏"
_WRITTEN_DOUBLE = "…—⋯"
_REPEATED = re.compile(rf"([{_ENDING}{_WRITTEN_DOUBLE}])\1{{3,}}")
_TILDES_AFTER_WORD = re.compile(r"(?<=\w)~{4,}")


def repeated_punctuation(text: str) -> str:
    """Shorten runs of one sentence mark. ~ only after a word (好的~~~~~), not as a code fence; lines of — stay."""
    cleaned = _REPEATED.sub(_shorten, text)
    if "~~~~" in cleaned:
        cleaned = _TILDES_AFTER_WORD.sub("~~~", cleaned)
    return text if len(cleaned) == len(text) else cleaned


def _shorten(match: re.Match[str]) -> str:
    sign, text, (start, end) = match[1], match.string, match.span()
    if sign not in _WRITTEN_DOUBLE:
        return sign * 3
    if sign == "—" and (start == 0 or text[start - 1] in "\r\n") and (end == len(text) or text[end] in "\r\n"):
        return match[0]
    return sign * 2
