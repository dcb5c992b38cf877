"""Converts a SentencePiece model into a `tokenizers` backend with the same ids.

SentencePiece writes a space as U+2581 and cannot distinguish the two. Here the vocabulary and the merges have real
spaces, and a literal U+2581 becomes one, so that the ids are those of SentencePiece (the tests compare them). For
models that this package trains, it can stay an ordinary character: then every text is reproduced exactly.
"""

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from z2all_ds.base.errors import DataError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.tokenizer.spm_model import SPACE_MARK, PieceKind, SpmModel, SpmPiece
from z2all_ds.tokenizer.spm_rules import START, differing_rules, parse_rules, rule_steps

CONVERSION = 2
"""Version of the conversion of other models. A change of their ids needs a new one."""
BEFORE_SPACES = "\n| *[^ \n]+| +"
"""Splits where a space follows another character, and around line ends."""
NEVER_BEST = -1000.0
"""Added to the lowest score: any other segmentation is better."""
_CROSSES_SPLIT = re.compile("[^ ] |\n")


def spm_to_backend(model: SpmModel, where: str, keeps_space_mark: bool = False) -> Tokenizer:
    """Return a backend that gives the same ids; `where` names the model in errors. If it keeps U+2581 as a character,
    texts with it get other ids."""
    vocabulary: dict[str, int] = {}
    for number, piece in enumerate(model.pieces):
        text = _with_spaces(piece.text) if piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED) else piece.text
        # A space and its mark may both be pieces; the later one is never used, but keeps its id.
        is_used = text not in vocabulary and not _has_literal_space(piece)
        vocabulary[text if is_used else f"<unreachable {number}>"] = number
    if model.kind == "bpe":
        backend = Tokenizer(_bpe(model, vocabulary))
        if model.has_all_bytes and not any(_CROSSES_SPLIT.search(text) for text in _mergeable(model)):
            # No piece and no unknown text crosses a split, so splitting changes no id. One text of 1.5 MB is encoded
            # at 2.9 to 3.8 MB/s instead of 1.3 to 1.9, texts of 3 kB at 2.3 to 2.9 instead of 3.2 to 4.1; long texts
            # matter more.
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(BEFORE_SPACES), behavior="isolated")
    elif model.kind == "unigram":
        unknown = next((n for n, piece in enumerate(model.pieces) if piece.kind is PieceKind.UNKNOWN), None)
        names = sorted(vocabulary, key=vocabulary.__getitem__)
        pairs = list(zip(names, _unigram_scores(model), strict=True))
        backend = Tokenizer(models.Unigram(pairs, unk_id=unknown, byte_fallback=model.has_all_bytes))
        if cuts := _cuts(model):
            firsts = {text[0]: [re.escape(one[1:]) for one in cuts if one[0] == text[0]] for text in cuts}
            pattern = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in firsts.items())
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="merged_with_previous")
    else:
        rule = f"SentencePiece models of kind {model.kind!r} are not supported"
        raise DataError(where, rule, "Give a bpe or unigram model.")
    with explain_content(DataError, where, "its normalization rules are damaged", "Use a complete copy."):
        if steps_before := _normalizers(model, keeps_space_mark):
            backend.normalizer = normalizers.Sequence(steps_before)
    steps: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        ends = {"left": 0, "right": 1} if model.space_after_word else {"left": 1, "right": 0}
        steps.append(decoders.Strip(content=" ", **ends))
    backend.decoder = decoders.Sequence(steps)
    for piece in model.pieces:
        # With byte fallback nothing is unknown, and no text gives <unk>.
        if piece.kind is PieceKind.CONTROL or (piece.kind is PieceKind.UNKNOWN and not model.has_all_bytes):
            backend.add_special_tokens([AddedToken(piece.text, special=True, normalized=False)])
    for symbol in _searched(model):
        if not (backend.normalizer.normalize_str(symbol) if backend.normalizer else symbol):
            rule = f"its rules remove the user-defined piece {symbol!r} from texts"
            raise DataError(where, rule, "Give a model without that piece.")
        # Searched for after the steps of the whole text; before them, each part would get its own space.
        backend.add_tokens([AddedToken(symbol, normalized=True)])
    return backend


def _unigram_scores(model: SpmModel) -> list[float]:
    """Return the scores of all pieces, by id."""
    lowest = min(piece.score for piece in model.pieces)
    highest = max([0.0, *(piece.score for piece in model.pieces if piece.kind is PieceKind.NORMAL)])

    def score(piece: SpmPiece) -> float:
        # Only these two kinds may occur in text; `tokenizers` searches for all, so the others get a very low score.
        if piece.kind not in (PieceKind.NORMAL, PieceKind.USER_DEFINED) or _has_literal_space(piece):
            return lowest + NEVER_BEST
        # As in SentencePiece: user-defined pieces are better than all others.
        return piece.score if piece.kind is PieceKind.NORMAL else len(piece.text.encode()) * highest - 0.1

    return [score(piece) for piece in model.pieces]


def _among_unknown(model: SpmModel) -> list[str]:
    """Return the pieces that are not for text, such as <unk> and <0x0A>, but that `tokenizers` finds in a text if it
    spells one out, because the pieces for its single characters do not suffice."""
    characters = {piece.text for piece in model.pieces if piece.kind is PieceKind.NORMAL}
    others = [piece.text for piece in model.pieces if piece.kind not in (PieceKind.NORMAL, PieceKind.USER_DEFINED)]
    return [text for text in others if len(text) > 1 and not characters.issuperset(text)]


def _cuts(model: SpmModel) -> list[str]:
    """Return those of `_among_unknown` that are not found if texts are cut after their first character.

    The cut must not divide a piece, nor two unknown characters, which are one token.
    """
    pieces = {piece.text for piece in model.pieces if piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED)}
    pairs = {text[start : start + 2] for text in pieces for start in range(len(text) - 1)}
    return [
        text
        for text in _among_unknown(model)
        if text[:2] not in pairs and (model.has_all_bytes or not {text[0], text[1]}.isdisjoint(pieces))
    ]


def differences(model: SpmModel) -> list[str]:
    """Return a warning for each kind of text to which the backend gives other ids than SentencePiece."""
    found = []
    if differing := differing_rules(model.charsmap, _symbols(model)) if model.charsmap else ():
        examples = ", ".join(" ".join(f"U+{ord(char):04X}" for char in key) for key, _ in differing[:3])
        found.append(
            f"{len(differing):,} of its normalization rules have no effect here, as they compete with others or are "
            f"newer than the Unicode version of `tokenizers`; text with these sequences gets other ids: {examples}"
        )
    symbols = _searched(model)
    if symbols and model.add_dummy_prefix:
        found.append(
            f"a text that consists only of a user-defined piece such as {symbols[0]!r} gets no additional space"
        )
    steps = normalizers.Sequence(_normalizers(model, keeps_space_mark=False))
    for symbol in symbols:
        if (changed := steps.normalize_str(symbol)) != symbol:
            found.append(f"text that its rules turn into {changed!r} becomes the user-defined piece {symbol!r}")
            break
    marked = [piece.text for piece in model.pieces if piece.kind is PieceKind.USER_DEFINED and SPACE_MARK in piece.text]
    if marked and model.remove_extra_whitespaces and model.charsmap and SPACE_MARK in parse_rules(model.charsmap):
        found.append(f"a literal U+2581 of the user-defined piece {marked[0]!r} is removed from texts like a space")
    if runs := [text for text in _symbols(model) if len(text) > len(set(text)) == 1 and model.kind == "unigram"]:
        found.append(f"runs of {runs[0][0]!r} that can be divided in several ways may be divided in another one")
    if model.kind == "unigram" and (spelled := sorted(set(_among_unknown(model)) - set(_cuts(model)))):
        found.append(f"a spelled-out {spelled[-1]!r} becomes that token, since not all of its characters are known")
    return found


def _with_spaces(text: str) -> str:
    return text.replace(SPACE_MARK, " ")


def _has_literal_space(piece: SpmPiece) -> bool:
    """Return whether a piece for text is never matched, as SentencePiece searches after replacing spaces."""
    return " " in piece.text and piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED)


def _symbols(model: SpmModel) -> tuple[str, ...]:
    """Return the texts of the user-defined pieces, to which rules do not apply."""
    return tuple(_with_spaces(piece.text) for piece in model.pieces if piece.kind is PieceKind.USER_DEFINED)


def _mergeable(model: SpmModel) -> list[str]:
    """Return the texts of the normal pieces, best first."""
    pieces = [(piece, n) for n, piece in enumerate(model.pieces) if piece.kind is PieceKind.NORMAL]
    normal = [(piece, n) for piece, n in pieces if not _has_literal_space(piece)]
    return [_with_spaces(piece.text) for piece, _ in sorted(normal, key=lambda one: (-one[0].score, one[1]))]


def _bpe(model: SpmModel, vocabulary: dict[str, int]) -> models.BPE:
    """Return a BPE model with a merge for every split of a piece into two pieces, the best piece first: SentencePiece
    merges any two adjacent pieces whose joined text is a piece."""
    best_first = _mergeable(model)
    known = set(best_first)
    merges = [
        (text[:cut], text[cut:])
        for text in best_first
        # The longer left part first, which is the same as taking the leftmost pair in runs of one character.
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in known and text[cut:] in known
    ]
    unknown = next((piece.text for piece in model.pieces if piece.kind is PieceKind.UNKNOWN), None)
    return models.BPE(
        vocab=vocabulary,
        merges=merges,
        byte_fallback=model.has_all_bytes,
        fuse_unk=not model.has_all_bytes,
        unk_token=None if model.has_all_bytes else unknown,
    )


def _normalizers(model: SpmModel, keeps_space_mark: bool) -> list[Any]:
    """Return the steps of SentencePiece in its order; the only white space it knows is U+0020."""
    if model.charsmap:
        return _with_rules(model)
    suffix = model.add_dummy_prefix and model.space_after_word
    steps: list[Any] = []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if not keeps_space_mark:
        steps.append(normalizers.Replace(SPACE_MARK, " "))
    if model.remove_extra_whitespaces and not suffix:
        steps.append(normalizers.Replace(Regex(r"(?<! ) +\z"), ""))
    if suffix:
        end = r"(?<! ) +\z|(?<=[^ ])\z" if model.remove_extra_whitespaces else r"(?<=[\s\S])\z"
        steps.append(normalizers.Replace(Regex(end + _except_before(_searched(model))), " "))
    elif model.add_dummy_prefix:
        steps.append(normalizers.Replace(Regex(rf"\A{_except(_searched(model))}(?=[\s\S])"), " "))
    return steps


def _searched(model: SpmModel) -> tuple[str, ...]:
    """Return the user-defined pieces that become added tokens, which `tokenizers` searches for. Unigram models find
    theirs by the score."""
    found = [piece for piece in model.pieces if piece.kind is PieceKind.USER_DEFINED and not _has_literal_space(piece)]
    return tuple(_with_spaces(piece.text) for piece in found) if model.kind == "bpe" else ()


def _except(symbols: Iterable[str]) -> str:
    """Return a pattern that fails before a user-defined piece which is all of the text: `tokenizers` searches for its
    normalized form, which must not begin with the additional space."""
    own = "|".join(map(re.escape, symbols))
    return rf"(?!(?:{own})\z)" if own else ""


def _except_before(symbols: Iterable[str], start: str = "") -> str:
    """Return a pattern that fails after a user-defined piece which is all of the text, for a space at the end."""
    return "".join(rf"(?<!\A{start}{re.escape(symbol)})" for symbol in symbols)


def _with_rules(model: SpmModel) -> list[Any]:
    """Return the steps of a model with normalization rules; START stays until the last one."""
    symbols = _symbols(model)
    steps: list[Any] = [normalizers.Prepend(START), *rule_steps(model.charsmap, symbols)]
    dummy_before = model.add_dummy_prefix and not model.space_after_word
    dummy_after = model.add_dummy_prefix and model.space_after_word
    rules = parse_rules(model.charsmap)
    blank = " " if SPACE_MARK in rules else f"[ {SPACE_MARK}]"
    if model.remove_extra_whitespaces:
        if dummy_after:
            # A text of characters that are removed has the dummy space, a text of spaces has not.
            spaces = "|".join(map(re.escape, (" ", *(key for key, value in rules.items() if value == " "))))
            steps.insert(0, normalizers.Replace(Regex(rf"\A(?:{spaces})+\z"), ""))
        # In one pass: after the beginning, before the end, after another space, and the beginning of an empty text.
        empty = rf"|\A{START}(?={blank}*\z)" if dummy_before else ""
        end = rf"(?<!{SPACE_MARK}){blank}+\z"
        steps.append(normalizers.Replace(Regex(rf"(?<=\A{START}) +|{end}|(?<= ) +{empty}"), ""))
    if SPACE_MARK not in rules:
        steps.append(normalizers.Replace(SPACE_MARK, " "))
    so_far = normalizers.Sequence(steps)
    forms = [(symbol, so_far.normalize_str(symbol).removeprefix(START)) for symbol in _searched(model)]
    searched = [form for symbol, form in forms if f" {form}" != symbol]  # that one has lost its space, and gets it back
    if dummy_after:
        steps.append(normalizers.Replace(Regex(rf"(?!\A)\z{_except_before(searched, START)}"), " "))
    if dummy_before:
        steps.append(normalizers.Replace(Regex(rf"\A{START}{_except(searched)}"), " "))
    if symbols or not dummy_before:
        steps.append(normalizers.Replace(Regex(rf"\A{START}"), ""))
    return steps
