"""The altering steps: functions from text to text. Each gives the same again when applied to its own result.

So does the chain in the order of `CleaningRules`. The order matters for that: taking blanks out can make a longer run
of signs (。。 。。), while shortening a run never makes a blank or a control.

A text without a hit comes back as the same object, which is how the caller knows cheaply that nothing changed.
"""

import re

# -- control characters -----------------------------------------------------------------------------------------------

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
# ASCII has no other controls, and deleting bytes is far faster than a search over characters.
_ASCII_CONTROLS = bytes([*range(9), *range(11, 32), 127])

# A flag of a region (England, Wales) is a black flag and tags; any other tag is invisible text.
_FLAGS_AND_TAGS = re.compile(f"(\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f)|[{_TAGS}]+")

# Scripts whose letters join, so that a joiner after one is spelling: Arabic to N'Ko, Indic, South-East Asian,
# Mongolian, Arabic presentation forms. The character after it does not matter: Malayalam and Kannada words end in one.
_JOINING_SCRIPTS = re.compile(
    "[\u0600-\u0dff\u0f00-\u109f\u1780-\u18af\u1900-\u1bff\ua800-\uabff\ufb50-\ufdcf\ufdf0-\ufdff\ufe70-\ufefc]"
)
_EMOJI = re.compile("[\u2190-\u23ff\u2600-\u27bf\u2b00-\u2bff\ufe0e\ufe0f\U0001f000-\U0001faff\U000e007f]")
_JOINER_RUN = re.compile(f"[{_JOINERS}]+")


def control_characters(text: str) -> str:
    """Removes what is not seen, and makes every line break a line feed; see `CleaningRules` for the list."""
    if text.isascii():
        if len(text.encode("ascii").translate(None, _ASCII_CONTROLS)) == len(text):
            return text
    elif not _ANY_CONTROL.search(text):
        return text
    cleaned = _CONTROLS.sub("", text)
    if not cleaned.isascii():
        # Tags before joiners: a flag's last tag may be followed by one, and tags behind one are no flag.
        cleaned = _FLAGS_AND_TAGS.sub(lambda match: match[1] or "", cleaned)
        cleaned = _JOINER_RUN.sub(_keep_joiner, cleaned)
    # Last: \r and \n with nothing visible between them are one line break, not two.
    cleaned = _OTHER_LINE_BREAKS.sub("\n", cleaned)
    return text if cleaned == text else cleaned


def _keep_joiner(match: re.Match[str]) -> str:
    """What stays of a run of joiners: at most one, decided by the visible characters on both sides."""
    text, before = match.string, match.start() - 1
    if before < 0:
        return ""
    if _JOINING_SCRIPTS.match(text, before):
        return match[0][0]
    if "\u200d" in match[0] and _EMOJI.match(text, before) and _EMOJI.match(text, match.end()):
        return "\u200d"
    return ""


# -- blanks in CJK text -----------------------------------------------------------------------------------------------

# Tabs are columns and stay. Hangul is not here: Korean writes blanks between words.
_BLANKS = " \xa0\u2000-\u200a\u202f\u205f\u3000"
_LETTERS_CJK = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f\u31a0-\u31bf"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_OPENING_CJK = "\u3008\u300a\u300c\u300e\u3010\u3014\u3016\u3018\u301a\u301d\uff08\uff3b\uff5b\uff5f\uff62"
# Quotes “” and dashes are not here: Latin text has them too, with a blank before.
_CLOSING_CJK = (
    "\u3001-\u3003\u3009\u300b\u300d\u300f\u3011\u3015\u3017\u3019\u301b\u301e\u301f\u30fb\uff01\uff0c\uff0e"
    "\uff1a\uff1b\uff1f\uff09\uff3d\uff5d\uff5e\uff60\uff61\uff63-\uff65\ufe10-\ufe16\ufe30\ufe50-\ufe57"
)
_CJK = _LETTERS_CJK + _OPENING_CJK + _CLOSING_CJK
# The lookbehinds let a run be tried from its start alone; a megabyte of blanks would take hours without them. They
# stand after the first blank, so that the search can run from blank to blank: 24 -> 61 MB/s on Chinese.
_CJK_BLANKS = re.compile(
    f"[{_BLANKS}](?:(?<=[{_CJK}][{_BLANKS}])[{_BLANKS}]*(?=[{_CJK}])|(?<=\\S[{_BLANKS}])[{_BLANKS}]*(?=[{_CLOSING_CJK}]))"
)
# First bytes of everything below U+3000, of the scripts behind Han (Hangul among them), and of planes above 3.
_UTF8_NOT_CJK = bytes([*range(0xE3), *range(0xEA, 0xEF), *range(0xF1, 0x100)])


def has_cjk_bytes(text: str) -> bool:
    """Whether a CJK character may be in the text: a test of the first bytes in UTF-8, faster than a regex."""
    if text.isascii():
        return False
    if "。" in text or "的" in text:  # at once in nearly all Chinese
        return True
    return bool(text.encode("utf-8", "surrogatepass").translate(None, _UTF8_NOT_CJK))


def space_before_cjk(text: str) -> str:
    """Takes out blanks between two CJK characters, and between anything and a CJK sign that ends or separates.

    An opening bracket after a Latin word keeps its blank (`Python 《手册》`), as do Latin and CJK side by side.
    """
    if not has_cjk_bytes(text):
        return text
    cleaned = _CJK_BLANKS.sub("", text)
    return text if len(cleaned) == len(text) else cleaned


# -- repeated punctuation ---------------------------------------------------------------------------------------------

# Signs of sentences. Not here, because four and more of them mean something: brackets (they nest), quotes and
# backslashes (they escape), slashes and colons (paths, fences), - = _ * # + (rules, tables, headings, gaps to fill in).
_ENDING = "!?.,;·•・。，、；！？．～〜｡､﹏"
_WRITTEN_DOUBLE = "…—⋯"
_REPEATED = re.compile(rf"([{_ENDING}{_WRITTEN_DOUBLE}])\1{{3,}}")
_TILDES_AFTER_WORD = re.compile(r"(?<=\w)~{4,}")


def repeated_punctuation(text: str) -> str:
    """Shortens runs of one sentence sign. ~ counts after a word (好的~~~~~), where it is a tone and no fence; a line of
    nothing but — is a rule and stays."""
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
