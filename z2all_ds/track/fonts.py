"""Fonts for plots: which fonts of this machine have the characters of our labels.

matplotlib's own font has no Chinese characters and draws boxes instead. If characters are missing, fonts that have them
are added: fonts of the machine, or those of the package `mplfonts`, of which only the files are used. A character that
no font has is written as its code point.
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
"""Fonts that have every character but draw a box for it."""
SANS_SERIF = ("cjk sc", "cjksc", "sans", "hei", "gothic")
"""Parts of the names of sans-serif fonts, which match ours."""


@dataclass(frozen=True)
class PlotFonts:
    """Fonts for some texts."""

    families: tuple[str, ...]
    """For matplotlib's font.family, which is searched in this order for each character."""
    unknown: frozenset[str]
    """Characters that none of them has."""

    def drawable(self, text: str) -> str:
        """Return the text on one line, with unknown characters as code points."""
        bad = {one for one in text if one in self.unknown or not (one.isprintable() or one.isspace())}
        return " ".join(text.translate({ord(one): f" U+{ord(one):04X} " for one in bad}).split())

    @property
    def note(self) -> str | None:
        if not self.unknown:
            return None
        some = " ".join(sorted(self.unknown)[:8])
        fix = "`pip install 'z2all_ds[fonts]'` installs a font for Chinese"
        return f"no font on this machine has {some}: written as code points; {fix}"


def fonts_for(texts: Iterable[str]) -> PlotFonts:
    """Return as few fonts as possible that have as many characters of these texts as possible."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    wanted = {character for text in texts for character in text if character.isprintable()}
    missing = _unknown_to(Path(findfont(OWN_FAMILY)), wanted)
    families = [OWN_FAMILY]
    for path, family in _candidates() if missing else ():
        left = _unknown_to(path, missing)
        if left < missing:
            if family is None:
                fontManager.addfont(str(path))
            families.append(family or FontProperties(fname=str(path)).get_name())
            missing = left
        if not missing:
            break
    return PlotFonts(tuple(families), frozenset(missing))


def _candidates() -> Iterable[tuple[Path, str | None]]:
    """Yield fonts that matplotlib knows by name, plain ones first; then others of the machine and of mplfonts."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = [font for font in fontManager.ttflist if not font.name.lower().startswith(BOXES_ONLY)]
    yield from ((Path(font.fname), font.name) for font in sorted(known, key=_preference))
    # matplotlib caches its list: fonts installed later are not in it.
    newer = {Path(file) for file in findSystemFonts()} - {Path(font.fname) for font in fontManager.ttflist}
    spec = importlib.util.find_spec("mplfonts")
    folders = [Path(folder) / "fonts" for folder in (spec.submodule_search_locations or [])] if spec else []
    shipped = [path for folder in folders for path in folder.glob("*") if path.suffix in (".otf", ".ttf")]
    for paths in (newer, shipped):
        yield from ((path, None) for path in sorted(paths, key=lambda path: ("NotoSansCJK" not in path.name, path)))


def _preference(font: "FontEntry") -> tuple[bool, bool, bool, str]:
    has_serifs = not any(word in font.name.lower() for word in SANS_SERIF)
    return font.style != "normal", str(font.weight) not in ("400", "normal", "regular"), has_serifs, font.name


def _unknown_to(path: Path, characters: set[str]) -> set[str]:
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(str(path))
    except (OSError, RuntimeError):  # deleted since matplotlib made its list, or a format that it cannot read
        return characters
    if not font.scalable:
        return characters  # bitmaps of emoji, which have only one size
    return {character for character in characters if not font.get_char_index(ord(character))}
