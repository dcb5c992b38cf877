"""Letters for pictures: which fonts of this machine know the characters of our labels.

matplotlib's own font has no Chinese and draws boxes in its place. Behind it stand, as far as they are needed, a font of
the machine that has the characters, or one of the package `mplfonts`, of which only the files are used. A character
that no font has is written as its number.
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.font_manager import FontEntry

OWN_FAMILY = "DejaVu Sans"
"""Comes with matplotlib."""
BOXES_ONLY = ("last resort", "lastresort", "blank")
"""Fonts that know every character and draw a box for it."""
PLAIN_SHAPES = ("cjk sc", "cjksc", "sans", "hei", "gothic")
"""In names of fonts that stand well beside ours, which has no serifs either."""


@dataclass(frozen=True)
class Lettering:
    """Fonts for some texts."""

    families: tuple[str, ...]
    """For matplotlib's font.family: looked through in this order, character by character."""
    unknown: frozenset[str]
    """Characters that none of them has."""

    def shown(self, text: str) -> str:
        """The text as it can be drawn, on one line."""
        parts = []
        for character in text:
            if character.isspace():
                parts.append(" ")
            elif character in self.unknown or not character.isprintable():
                parts.append(f" U+{ord(character):04X} ")
            else:
                parts.append(character)
        return " ".join("".join(parts).split())

    @property
    def note(self) -> str | None:
        """What a person should know and can do."""
        if not self.unknown:
            return None
        some = " ".join(sorted(self.unknown)[:8])
        return f"no font here has {some}: written as numbers; `pip install 'z2all_ds[fonts]'` brings one for Chinese"


def lettering_for(texts: Iterable[str]) -> Lettering:
    """Fonts that have as many of these texts' characters as possible; no more fonts than are needed."""
    from matplotlib.font_manager import findfont

    wanted = {character for text in texts for character in text if character.isprintable()}
    missing = _unknown_to(Path(findfont(OWN_FAMILY)), wanted)
    families = [OWN_FAMILY]
    for path, family in _candidates() if missing else ():
        left = _unknown_to(path, missing)
        if left < missing:
            families.append(family or _registered(path))
            missing = left
        if not missing:
            break
    return Lettering(tuple(families), frozenset(missing))


def _candidates() -> Iterable[tuple[Path, str | None]]:
    """Fonts that matplotlib knows by name, the plainest first; then others of the machine, and those of mplfonts."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = [font for font in fontManager.ttflist if not font.name.lower().startswith(BOXES_ONLY)]
    yield from ((Path(font.fname), font.name) for font in sorted(known, key=_plainness))
    # matplotlib keeps its list for good: a font that was installed later is not in it.
    newer = {Path(file) for file in findSystemFonts()} - {Path(font.fname) for font in fontManager.ttflist}
    spec = importlib.util.find_spec("mplfonts")
    places = [Path(place) / "fonts" for place in (spec.submodule_search_locations or [])] if spec else []
    shipped = [path for place in places for path in place.glob("*") if path.suffix in (".otf", ".ttf")]
    for paths in (newer, shipped):
        yield from ((path, None) for path in sorted(paths, key=lambda path: ("NotoSansCJK" not in path.name, path)))


def _plainness(font: "FontEntry") -> tuple[bool, bool, bool, str]:
    is_plain = any(word in font.name.lower() for word in PLAIN_SHAPES)
    return font.style != "normal", str(font.weight) not in ("400", "normal", "regular"), not is_plain, font.name


def _unknown_to(path: Path, characters: set[str]) -> set[str]:
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(str(path))
    except (OSError, RuntimeError):  # gone since matplotlib made its list, or of a kind that it cannot read
        return characters
    if not font.scalable:
        return characters  # pictures of emoji, which are drawn at one size only
    return {character for character in characters if not font.get_char_index(ord(character))}


def _registered(path: Path) -> str:
    """matplotlib finds fonts by their family's name."""
    from matplotlib.font_manager import FontProperties, fontManager

    fontManager.addfont(str(path))
    return FontProperties(fname=str(path)).get_name()
