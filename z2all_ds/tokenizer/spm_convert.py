"""Turns a SentencePiece model into a `tokenizers` one that gives the same ids and loads in plain transformers.

SentencePiece writes a blank as U+2581 and so cannot tell the two apart. Here the vocabulary and the merges are written
with real blanks and nothing is replaced in the text: a literal U+2581 is then a character like any other, and every
text comes back exactly. For text without that character the ids are SentencePiece's own (the tests compare them).
"""

import re
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from z2all_ds.base.errors import DataError
from z2all_ds.tokenizer.spm_model import PieceKind, SpmModel

BLANK_MARK = "\u2581"
BEFORE_BLANKS = "\n| *[^ \n]+| +"
"""Cuts where a blank follows something else, and around line ends."""
NEVER_BEST = -1000.0
"""Score of a piece that no cut into other pieces is worse than."""
_OVER_A_CUT = re.compile("[^ ] |\n")


def spm_to_backend(model: SpmModel, where: str) -> Tokenizer:
    """The same ids for the same text. `where` names the model in errors."""
    vocabulary: dict[str, int] = {}
    for number, piece in enumerate(model.pieces):
        text = _with_blanks(piece.text) if piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED) else piece.text
        # A blank and its mark may both be pieces; the later one could never be reached, but keeps its number.
        vocabulary[text if text not in vocabulary else f"<unreachable {number}>"] = number
    if model.kind == "bpe":
        backend = Tokenizer(_bpe(model, vocabulary))
        if not any(_OVER_A_CUT.search(text) for text in _mergeable(model)):
            # No piece reaches over such a place, so cutting changes no id. One text of 1.5 MB is encoded at 2.9 to
            # 3.8 MB/s instead of 1.3 to 1.9; texts of 3 kB at 2.3 to 2.9 instead of 3.2 to 4.1. The long ones decide.
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(BEFORE_BLANKS), behavior="isolated")
    elif model.kind == "unigram":
        unknown = next((n for n, piece in enumerate(model.pieces) if piece.kind is PieceKind.UNKNOWN), None)
        names = sorted(vocabulary, key=vocabulary.__getitem__)
        # Only normal pieces may be found in text; `tokenizers` looks for all of them, so the others are made too dear.
        floor = min(piece.score for piece in model.pieces) + NEVER_BEST
        normal = [piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED) for piece in model.pieces]
        pairs = [(text, model.pieces[n].score if normal[n] else floor) for n, text in enumerate(names)]
        backend = Tokenizer(models.Unigram(pairs, unk_id=unknown, byte_fallback=model.has_all_bytes))
    else:
        raise DataError(where, f"a SentencePiece model of kind {model.kind!r}; read are bpe and unigram", "Train anew.")
    if steps := _normalizers(model):
        backend.normalizer = normalizers.Sequence(steps)
    back: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        ends = {"left": 0, "right": 1} if model.blank_after_word else {"left": 1, "right": 0}
        back.append(decoders.Strip(content=" ", **ends))
    backend.decoder = decoders.Sequence(back)
    for piece in model.pieces:
        # With byte fallback nothing is unknown: <unk> stays a number that no text reaches.
        if piece.kind is PieceKind.CONTROL or (piece.kind is PieceKind.UNKNOWN and not model.has_all_bytes):
            backend.add_special_tokens([AddedToken(piece.text, special=True, normalized=False)])
        elif piece.kind is PieceKind.USER_DEFINED:
            backend.add_tokens([AddedToken(_with_blanks(piece.text), normalized=False)])
    return backend


def _with_blanks(text: str) -> str:
    return text.replace(BLANK_MARK, " ")


def _mergeable(model: SpmModel) -> list[str]:
    """The pieces that merging can make, best first."""
    normal = [(piece, n) for n, piece in enumerate(model.pieces) if piece.kind is PieceKind.NORMAL]
    return [_with_blanks(piece.text) for piece, _ in sorted(normal, key=lambda one: (-one[0].score, one[1]))]


def _bpe(model: SpmModel, vocabulary: dict[str, int]) -> models.BPE:
    """SentencePiece merges any two neighbours whose joint text is a piece, the best piece first; so every way to cut a
    piece into two pieces is a merge of that rank."""
    best_first = _mergeable(model)
    known = set(best_first)
    merges = [
        (text[:cut], text[cut:])
        for text in best_first
        # The longer left part first: in runs of one sign this is what taking the leftmost pair comes to.
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


def _normalizers(model: SpmModel) -> list[Any]:
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        end = normalizers.Replace(Regex(r"(?<=.)\z"), " ") if model.blank_after_word else normalizers.Prepend(" ")
        steps.append(end)
    return steps
