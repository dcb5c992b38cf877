"""Converts the normalization rules of a SentencePiece model into steps of `tokenizers` with the same result.

The rules (NFKC and its variants) map sequences of one to four characters. At each position SentencePiece applies the
longest one. `tokenizers` has the same rules in `Precompiled`, but applies them per grapheme cluster: to the first
character of a cluster below six bytes, whose other characters are lost, else to each character. So

1. a mark goes before every character that may continue a cluster: each cluster has one character that is replaced;
2. where a rule of several characters applies, the mark becomes another one;
3. `Precompiled` replaces single characters;
4. the marks of step 2 are removed, and NFC composes what they separated. It cannot compose across the other marks;
5. the other marks are removed.

NFC is the same as the rules of several characters if those come from Unicode. `differing_rules` finds others. Those
that can be applied independently of all others, and the user-defined pieces that the rules would change, are replaced
by codes after step 1, which become their results at the end.
"""

import re
import struct
from collections import defaultdict
from functools import lru_cache
from typing import Any

from tokenizers import Regex, normalizers

APART, JOINED = "\ufdd0\ufdd1", "\ufdd0\ufdd2"
"""The marks are pairs of noncharacters. A real noncharacter gets a mark before it, so no text contains a mark."""
CONTINUES_CLUSTER = r"\p{M}\p{Cf}\p{Cn}\u0e33\u0eb3\uff9e\uff9f\x{1f3fb}-\x{1f3ff}"
"""More than those that do is harmless. Unassigned characters may do so in another version of Unicode."""
CODE, CODE_DIGITS = "\ufdd0\ufddd", "\ufdde\ufddf\ufde0\ufde1\ufde2\ufde3\ufde4\ufde5\ufde6\ufde7"
"""The code of a text that is kept from the rules: the mark and two digits."""
MOST_KEPT = len(CODE_DIGITS) ** 2
MOST_OWN_RULES = 10
"""Rules that are applied one by one: each costs 27 ns/byte, where the encoding takes 300 ns/byte."""
MOST_NODES = 5_000_000
"""NFKC has 230,000. The trie shares ends of rules, so that a damaged one could have any number."""
START = "\ue000"
"""Put before the text: `tokenizers` panics in NFC if an earlier step inserts or removes something at its beginning."""


@lru_cache(4)
def parse_rules(charsmap: bytes) -> dict[str, str]:
    """Return the rules, or raise ValueError if the bytes are damaged. They are a 32-bit size, a double-array trie of
    UTF-8 (Darts), and the values, each ended by a zero."""
    try:
        size = struct.unpack_from("<I", charsmap)[0]
        units = struct.unpack_from(f"<{size // 4}I", charsmap, 4)
        values = charsmap[4 + size :]
        children: dict[int, list[int]] = defaultdict(list)
        for position, unit in enumerate(units[1:], 1):
            if unit >> 31 == 0 and unit & 0xFF:
                children[position ^ unit & 0xFF].append(position)
        found: dict[str, str] = {}
        nodes, visited = [(b"", _children_at(0, units[0]))], 0
        while nodes:
            prefix, base = nodes.pop()
            visited += 1
            if len(prefix) > 64 or visited > MOST_NODES:
                raise ValueError("too many rules")
            for position in children.get(base, ()):
                unit = units[position]
                key, below = prefix + bytes([unit & 0xFF]), _children_at(position, unit)
                if unit >> 8 & 1:
                    start = units[below] & 0x7FFFFFFF
                    found[key.decode("utf-8")] = values[start : values.index(b"\0", start)].decode("utf-8")
                nodes.append((key, below))
    except (struct.error, IndexError) as error:
        raise ValueError(str(error)) from None
    return found


def _children_at(position: int, unit: int) -> int:
    return position ^ (unit >> 10) << ((unit & 0x200) >> 6)


@lru_cache(4)
def rule_steps(charsmap: bytes, symbols: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Return the normalizers that apply the rules to a text after START as SentencePiece does; START remains.

    The user-defined pieces in `symbols` stay as they are, and no rule applies across their ends.
    """
    apply = normalizers.Sequence(list(_steps(charsmap, symbols)))
    changed = [symbol for symbol in symbols if apply.normalize_str(START + symbol) != START + symbol]
    changed = sorted(changed, key=len, reverse=True)[: MOST_KEPT - MOST_OWN_RULES]
    return _steps(charsmap, symbols, (*((symbol, symbol) for symbol in changed), *_own_rules(charsmap, symbols)))


def _steps(charsmap: bytes, symbols: tuple[str, ...] = (), kept: tuple[tuple[str, str], ...] = ()) -> tuple[Any, ...]:
    """Return the normalizers; texts in `kept` become what is given for them, whatever the rules are."""
    rules = parse_rules(charsmap)
    followers = {char for key in rules for char in key[1:]}
    # One class at the front takes 27 ns/byte of English, two alternatives take 47.
    before = rf"(?=[\n{CONTINUES_CLUSTER}{_class(followers)[1:-1]}])(?!\A|(?<!\r)\n)"
    put_apart = normalizers.Replace(Regex(before), APART)
    replace, bring_together = normalizers.Precompiled(charsmap), normalizers.Replace(APART, "")

    def apart(text: str) -> str:
        """Return the text as it is after the first step; after a letter, as that step treats the beginning apart."""
        return str(put_apart.normalize_str(f"a{text}"))[1:].removeprefix(APART)

    digits = [first + second for first in CODE_DIGITS for second in CODE_DIGITS]
    codes = [(apart(text), CODE + code, result) for (text, result), code in zip(kept, digits, strict=False)]
    put_aside = [put_apart, *(normalizers.Replace(text, code) for text, code, _ in codes)]
    put_back = [bring_together, *(normalizers.Replace(code, result) for _, code, result in codes)]
    if not followers:
        return *put_aside, replace, *put_back
    joins = _joins([key for key in rules if len(key) > 1])
    if symbols:
        ends = [re.escape(apart(symbol) + APART) for symbol in symbols]
        joins = f"{joins}(?<!{'|'.join(ends)})"
    fold_aside, fold_back = _folded(rules, followers)
    return (
        *put_aside,
        normalizers.Replace(Regex(joins), JOINED),
        *fold_aside,
        replace,
        *fold_back,
        normalizers.Replace(JOINED, ""),
        normalizers.NFC(),
        *put_back,
    )


@lru_cache(4)
def _own_rules(charsmap: bytes, symbols: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return rules that `_steps` does not apply, to be applied one by one.

    Not those that overlap with another rule or a user-defined piece, where the order would decide, and not those of
    new scripts, which are too many.
    """
    rules = parse_rules(charsmap)
    keys = [key for key in rules if len(key) > 1]
    differing = [key for key, _ in _differing(charsmap, ()) if max(key) < "\U00010000"]
    free = [key for key in differing if not set(key) & set("".join(symbols))][:MOST_OWN_RULES]
    return tuple((key, rules[key]) for key in free if not any(_takes_from(other, key) for other in keys))


def _takes_from(other: str, key: str) -> bool:
    """Return whether the rule of `other` may apply to a part of a text where that of `key` would."""
    tails = [other[start:] for start in range(1, len(other))]
    overlap = other.startswith(key) or any(tail.startswith(key) or key.startswith(tail) for tail in tails)
    return overlap and other != key


def _folded(rules: dict[str, str], followers: set[str]) -> tuple[list[Any], list[Any]]:
    """Return steps before and after the replacement of single characters, for joined ones that case folding would
    change: the Greek iota below a letter, and I with a dot, which SentencePiece does not fold."""
    cases: list[tuple[str, str, str]] = []
    for char in sorted(followers):
        if rules.get(char, char) not in followers:
            cases.append((char, "", char))
    firsts: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for key, value in rules.items():
        if len(key) == 2 and key[0] in rules and rules[key[0]] + key[1] not in rules:
            firsts[key[1], rules[key[0]], value].add(key[0])
    before, after = [], []
    for place, (char, folded, value) in enumerate([*cases, *sorted(firsts)][:10], 1):
        code = JOINED[0] + chr(ord(JOINED[1]) + place)
        behind = f"(?<={_class(firsts[char, folded, value])}{JOINED})" if folded else ""
        before.append(normalizers.Replace(Regex(f"{JOINED}{behind}{char}"), code))
        after.append(normalizers.Replace(folded + code, value))
    return before, after


def differing_rules(charsmap: bytes, symbols: tuple[str, ...] = ()) -> tuple[tuple[str, str], ...]:
    """Return the rules that `rule_steps` applies differently."""
    return _differing(charsmap, _own_rules(charsmap, symbols))


@lru_cache(4)
def _differing(charsmap: bytes, kept: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    rules = parse_rules(charsmap)
    # A letter and a line end keep the rules apart; no Unicode rule contains both.
    apart = "\x00"
    # Of long keys one per value, which leaves 40,000 of 220,000: most spell a Hangul syllable in other characters, and
    # these characters occur in short keys too.
    long = {value: key for key, value in rules.items() if len(key) > 2}
    keys = [key for key in (*(key for key in rules if len(key) < 3), *long.values()) if apart not in key]
    steps = normalizers.Sequence(list(_steps(charsmap, (), kept)))
    differing: list[tuple[str, str]] = []
    for place in range(0, len(keys), 1000):  # shorter texts take less time per character
        part = keys[place : place + 1000]
        found = steps.normalize_str(apart.join((START, *part))).split(apart)[1:]
        differing += [(key, rules[key]) for key, value in zip(part, found, strict=True) if value != rules[key]]
    return tuple(differing)


def _joins(keys: list[str]) -> str:
    """Return a pattern that matches the mark between two characters which belong to one key."""
    # Keys with the same characters at one place and equal sets elsewhere are merged, which leaves a few hundred of
    # 200,000: first by first characters, then by last ones, and so on.
    firsts: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        firsts[key[1:]].add(key[0])
    merged = {(frozenset(chars), *map(frozenset, rest)) for rest, chars in firsts.items()}
    for place in (-1, -2, -3):
        groups: dict[Any, set[str]] = defaultdict(set)
        for one in merged:
            if len(one) > -place:
                groups[one[:place], one[place:][1:]] |= one[place]
        merged = {one for one in merged if len(one) <= -place}
        merged |= {(*left, frozenset(chars), *right) for (left, right), chars in groups.items()}
    mark = APART
    parts = sorted(
        f"(?=[{_class(one[-1])[1:-1]}])(?<={mark.join(_class(chars) for chars in one[:-1])}{mark})" for one in merged
    )
    return f"{mark}(?:{'|'.join(parts)})" if parts else ""


def _class(chars: set[str] | frozenset[str]) -> str:
    """Return a character class with ranges."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, chars)):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "[" + "".join(f"\\x{{{a:x}}}" + (f"-\\x{{{b:x}}}" if b > a else "") for a, b in ranges) + "]"
