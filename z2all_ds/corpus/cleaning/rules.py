"""Selection of the cleaning steps of a build. All are off by default."""

import difflib
from dataclasses import asdict, dataclass, fields
from typing import Any

from z2all_ds.base.errors import ConfigError

ALTERING = ("control_characters", "space_before_cjk", "repeated_punctuation")
"""Steps that change a text; never applied to code."""

EVERY_STEP: dict[str, Any] = {
    "garbled": True,
    "control_characters": True,
    "space_before_cjk": True,
    "repeated_punctuation": True,
    "min_chars": 20,  # shorter texts are headings, buttons and fragments of pages
    "max_chars": 5_000_000,  # the longest novels fit; longer texts are dumps and logs
    "max_symbol_share": 0.2,  # formulas and emoji stay well below; ASCII art does not
    "exact_duplicates": True,
    "near_duplicates": 0.8,
}
"""Values that `all` sets, and the value of a bare name (`min_chars` is `min_chars=20`)."""


@dataclass(frozen=True)
class CleaningRules:
    """One field per step; the steps run in this order."""

    garbled: bool = False
    """Drops text that was decoded with a wrong encoding or consists of block characters. It runs on the original text,
    because the next step removes some of the evidence, and again after the altering steps."""
    control_characters: bool = False
    """Removes terminal sequences (ESC[33m), C0 and C1 controls other than tab and line feed, zero-width and direction
    marks, soft hyphens, private use characters and U+FEFF; every other line break (\\r\\n, \\r, form feed, U+2028 ...)
    becomes \\n. Joiners stay in emoji and after letters of Arabic, Indic and related scripts, which need them."""
    space_before_cjk: bool = False
    """Removes spaces between two CJK characters and before CJK punctuation; keeps tabs and indentation."""
    repeated_punctuation: bool = False
    """Shortens a run of more than three equal sentence marks to three (。。。。。。 -> 。。。), and of marks that are
    written twice to two (………… -> ……). Marks for lines and headings (- = _ * #) stay."""
    min_chars: int = 0
    """Drops documents with fewer characters, without leading and trailing whitespace."""
    max_chars: int | None = None
    """Drops documents with more characters, without leading and trailing whitespace."""
    max_symbol_share: float | None = None
    """Drops documents with a larger fraction of symbols: characters other than letters, digits, whitespace and
    punctuation. In code, ASCII symbols (+ < = > | ~ ...) do not count."""
    exact_duplicates: bool = False
    """Drops documents whose content, without leading and trailing whitespace, was seen before."""
    near_duplicates: float | None = None
    """Drops documents whose shingles have at least this Jaccard similarity with an earlier one; 0.8 is usual."""

    def __post_init__(self) -> None:
        for step in (*ALTERING, "garbled", "exact_duplicates"):
            if type(getattr(self, step)) is not bool:
                raise ConfigError(
                    f"{step}={getattr(self, step)!r}", "must be on or off", f"Write {step} or {step}=off."
                )
        for step, least in (("min_chars", 0), ("max_chars", 1)):
            value = getattr(self, step)
            if (type(value) is not int or value < least) and (step, value) != ("max_chars", None):
                raise ConfigError(f"{step}={value!r}", f"must be an integer >= {least}", f"E.g. {EVERY_STEP[step]}.")
        if self.max_chars is not None and self.max_chars < self.min_chars:
            rule = f"must not be below min_chars={self.min_chars}"
            raise ConfigError(f"max_chars={self.max_chars}", rule, "Raise max_chars or lower min_chars.")
        for step in ("max_symbol_share", "near_duplicates"):
            value = getattr(self, step)
            if value is not None and not (type(value) in (int, float) and 0 <= value <= 1):  # refuses NaN too
                raise ConfigError(f"{step}={value!r}", "must be between 0 and 1", f"E.g. {step}={EVERY_STEP[step]}.")
        if self.near_duplicates is not None and self.near_duplicates < 0.3:
            # Bands of one or two rows would make every document a candidate of every other.
            rule = "must be at least 0.3: below it unrelated documents count as similar"
            raise ConfigError(f"near_duplicates={self.near_duplicates}", rule, "Use 0.7 to 0.9; 0.8 is usual.")

    @classmethod
    def parse(cls, names: list[str]) -> "CleaningRules":
        """Parse the command line: `control_characters`, `min_chars=20`, `near_duplicates=off`, or `all`.

        Later items override earlier ones: `all min_chars=50 near_duplicates=off`.
        """
        chosen: dict[str, Any] = {}
        for written in names:
            name, equals, value = (part.strip() for part in written.partition("="))
            if name == "all" and not equals:
                chosen |= EVERY_STEP
            elif name in EVERY_STEP:
                chosen[name] = _parse_value(name, value) if equals else EVERY_STEP[name]
            else:
                near = difflib.get_close_matches(name, ["all", *EVERY_STEP], n=1)
                fix = f"Did you mean {near[0]}?" if near else "Choose from these; `all` takes no value."
                raise ConfigError(f"cleaning step {written!r}", f"must be one of all, {', '.join(EVERY_STEP)}", fix)
        return cls(**chosen)

    @property
    def steps_on(self) -> list[str]:
        """Names of the active steps, in order."""
        return [one.name for one in fields(self) if getattr(self, one.name) != one.default]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _parse_value(name: str, written: str) -> Any:
    example = EVERY_STEP[name]
    if written in ("off", "false"):
        return CleaningRules.__dataclass_fields__[name].default
    if isinstance(example, bool):
        if written in ("on", "true"):
            return True
        raise ConfigError(f"{name}={written}", "must be on or off", f"Write {name} or {name}=off.")
    try:
        return type(example)(written)
    except ValueError:
        kind = "an integer" if isinstance(example, int) else "a number"
        raise ConfigError(f"{name}={written}", f"must be {kind}", f"E.g. {name}={example}.") from None
