"""Which cleaning steps a build takes. All are off until asked for: what to throw away is the user's decision."""

import difflib
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from z2all_ds.base.errors import ConfigError

ALTERING = ("control_characters", "space_before_cjk", "repeated_punctuation")
"""Steps that change a text; never taken on code."""

EVERY_STEP: dict[str, Any] = {
    "garbled": True,
    "control_characters": True,
    "space_before_cjk": True,
    "repeated_punctuation": True,
    "min_chars": 20,  # less is a heading, a button or a crumb of a page
    "max_chars": 5_000_000,  # the longest novels fit; beyond are dumps and logs
    "max_symbol_share": 0.2,  # formulas and emoji stay well below; drawings made of signs do not
    "exact_duplicates": True,
    "near_duplicates": 0.8,
}
"""What `all` switches on, and what a bare name means (`min_chars` alone is `min_chars=20`)."""

_SWITCHES = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True)
class CleaningRules:
    """Each field is one step; the steps run in this order."""

    garbled: bool = False
    """Drops text that was decoded wrongly or is made of block characters. It looks at the text as it came, since
    the next step takes out part of the evidence, and once more after the altering steps."""
    control_characters: bool = False
    """Removes C0 and C1 controls other than tab and line feed, zero-width and direction marks, soft hyphens, private
    use, and U+FEFF; every other line break (\\r\\n, \\r, form feed, U+2028 ...) becomes \\n. Joiners stay where they
    are spelling: in emoji, and after letters of Arabic, Indic and kindred scripts."""
    space_before_cjk: bool = False
    """Takes out blanks between two CJK characters and before CJK punctuation; not tabs, not indentation."""
    repeated_punctuation: bool = False
    """Shortens a run of more than three of one sentence sign to three of it (。。。。。。 -> 。。。), and of the signs
    that are written double to two (………… -> ……). Signs that draw lines or mark headings (- = _ * #) are left alone."""
    min_chars: int = 0
    """Drops documents with fewer characters, blanks at the ends aside."""
    max_chars: int | None = None
    """Drops documents with more characters, blanks at the ends aside."""
    max_symbol_share: float | None = None
    """Drops documents with a larger share of signs that are neither letters, digits, blanks nor punctuation. In code
    the signs of ASCII (+ < = > | ~ ...) do not count: they are its words."""
    exact_duplicates: bool = False
    """Drops documents whose content, blanks at the ends aside, was seen before."""
    near_duplicates: float | None = None
    """Drops documents whose shingles have at least this Jaccard similarity with an earlier one; 0.8 is usual."""

    def __post_init__(self) -> None:
        for step in (*ALTERING, "garbled", "exact_duplicates"):
            if type(getattr(self, step)) is not bool:
                raise ConfigError(f"{step}={getattr(self, step)!r}", "must be on or off", f"Write {step} to take it.")
        _check_count("min_chars", self.min_chars, least=0)
        if self.max_chars is not None:
            _check_count("max_chars", self.max_chars, least=1)
            if self.max_chars < self.min_chars:
                rule = f"must not be below min_chars={self.min_chars}, or nothing would be left"
                raise ConfigError(f"max_chars={self.max_chars}", rule, "Raise max_chars or lower min_chars.")
        for step in ("max_symbol_share", "near_duplicates"):
            _check_share(step, getattr(self, step))
        if self.near_duplicates is not None and self.near_duplicates < 0.3:
            # Below, bands have one or two rows and every document becomes a candidate of every other.
            rule = "below 0.3 unrelated documents count as alike"
            raise ConfigError(f"near_duplicates={self.near_duplicates}", rule, "Take 0.7 to 0.9; 0.8 is usual.")

    @classmethod
    def parse(cls, names: list[str]) -> "CleaningRules":
        """From the command line: `control_characters`, `min_chars=20`, `near_duplicates=off`, or `all`; later ones
        win, so `all min_chars=50 near_duplicates=off` is every other step and a minimum of one's own."""
        chosen: dict[str, Any] = {}
        for written in names:
            name, equals, value = (part.strip() for part in written.partition("="))
            if name == "all" and not equals:
                chosen |= EVERY_STEP
            elif name in EVERY_STEP:
                chosen[name] = _value(name, value) if equals else EVERY_STEP[name]
            else:
                near = difflib.get_close_matches(name, ["all", *EVERY_STEP], n=1)
                fix = f"Did you mean {near[0]}?" if near else "Choose from these; `all` takes no value."
                raise ConfigError(f"cleaning step {written!r}", f"must be one of all, {', '.join(EVERY_STEP)}", fix)
        return cls(**chosen)

    @property
    def steps_on(self) -> list[str]:
        """Names of the steps that are taken, in order."""
        off = CleaningRules.__new__(CleaningRules)  # the defaults, which are class attributes
        return [one.name for one in fields(self) if getattr(self, one.name) != getattr(off, one.name)]

    @property
    def altering_steps_on(self) -> list[str]:
        return [step for step in self.steps_on if step in ALTERING]

    def without_altering(self) -> "CleaningRules":
        """The rules as they are for code."""
        return replace(self, **dict.fromkeys(ALTERING, False))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _value(name: str, written: str) -> Any:
    example = EVERY_STEP[name]
    if written in ("off", "false"):
        return CleaningRules.__dataclass_fields__[name].default
    if isinstance(example, bool):
        if written not in _SWITCHES:
            raise ConfigError(f"{name}={written}", "is switched on or off", f"Write {name} or {name}=off.")
        return _SWITCHES[written]
    try:
        return type(example)(written.replace("_", "") if written.replace("_", "").isdigit() else written)
    except ValueError:
        kind = "a whole number" if isinstance(example, int) else "a number"
        raise ConfigError(f"{name}={written}", f"takes {kind}", f"E.g. {name}={example}.") from None


def _check_count(step: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{step}={value!r}", f"must be a whole number from {least}", f"E.g. {EVERY_STEP[step]}.")


def _check_share(step: str, value: Any) -> None:
    # A NaN fails the comparison too.
    if value is not None and not (type(value) in (int, float) and 0 <= value <= 1):
        raise ConfigError(f"{step}={value!r}", "must be a share from 0 to 1", f"E.g. {step}={EVERY_STEP[step]}.")
