"""Probe files: short questions with a numeric answer, repeated for a model while it trains.

A YAML list. The keys of a probe decide its kind:

completion  prompt, completion          the probability of the completion; for a list, of any of its texts
sentence    text                        the text's perplexity per token
compare     better, worse (prompt, per) how many nats more likely `better` is than `worse`, per token, byte or in total
format      prompt, starts_with         the probability that the answer starts with it; `matches` and `json` check the
                                        greedy answer too, in `z2all evaluate probes` only

A comparison is a margin and not a probability of preference: between sentences that probability is nearly always 0 or
1, and the curve would not show what is being learned. Above 0 the model prefers `better`. `at_least` and `at_most` set
the expected value, from the step `from_step` on.

Plain data: no torch, so that a mistake in the file is reported before a run is launched.
"""

import difflib
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from z2all_ds.base.config.section_errors import first_problem
from z2all_ds.base.config.sections import Section
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.resources import find_named_file
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.base.yaml_text import BadYaml, load_yaml

DEFAULT_FILE = "zh_en"
"""The name of a shipped file."""
HINT = "See z2all_ds/probes/zh_en.yaml for examples."


def _check_texts(texts: str | tuple[str, ...]) -> str | tuple[str, ...]:
    several = (texts,) if isinstance(texts, str) else texts
    if not several or not all(several):
        raise ValueError("at least one text must be given, and none may be empty")
    if len(set(several)) < len(several):
        raise ValueError("a text must not be given twice")
    return texts


Texts = Annotated[str | tuple[str, ...], AfterValidator(_check_texts)]
"""One text, or several different ones."""


class Probe(Section):
    """Fields of every probe."""

    kind: ClassVar[str]
    own_keys: ClassVar[tuple[str, ...]]
    """Keys that no other kind has; they identify the kind."""
    is_probability: ClassVar[bool] = False

    name: str = Field(min_length=1, max_length=64)
    """Name of its curve."""
    at_least: float | None = None
    """Minimum expected value."""
    at_most: float | None = None
    """Maximum expected value."""
    from_step: int = Field(0, ge=0)
    """The expectation is not judged before this step."""

    @field_validator("name")
    @classmethod
    def _is_one_word(cls, name: str) -> str:
        if not name.isprintable() or any(char.isspace() for char in name):
            raise ValueError(f"name {name!r} must be one word without spaces")
        return name

    @model_validator(mode="after")
    def _can_be_met(self) -> "Probe":
        for bound in ("at_least", "at_most"):
            value = getattr(self, bound)
            if value is not None and self.is_probability and not 0 <= value <= 1:
                raise ValueError(f"{bound}={value:g}: the value is a probability, so the bound must be between 0 and 1")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least={self.at_least:g} must not exceed at_most={self.at_most:g}")
        return self

    @property
    def definition(self) -> dict[str, Any]:
        """The fields for displaying its values."""
        bounds = {"at_least": self.at_least, "at_most": self.at_most, "from_step": self.from_step}
        return {"name": self.name, "kind": self.kind, **bounds}

    @property
    def question(self) -> dict[str, Any]:
        """All fields that are set: values of probes with equal fields can be compared."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    def is_judged(self, step: int | None) -> bool:
        """Return whether there is an expectation at this step; a model without a known step counts as finished."""
        is_asked = self.at_least is not None or self.at_most is not None
        return is_asked and (step is None or step >= self.from_step)

    def is_met(self, value: float) -> bool:
        """Return whether the value meets the expectation; NaN does not."""
        enough = self.at_least is None or value >= self.at_least
        return enough and (self.at_most is None or value <= self.at_most)


class CompletionProbe(Probe):
    """Knowledge: P("北京" | "中国的首都是")."""

    kind = "completion"
    own_keys = ("completion",)
    is_probability = True

    prompt: str = Field(min_length=1)
    """Text before the completion."""
    completion: Texts
    """Expected text; for a list, any of them."""


class SentenceProbe(Probe):
    """Perplexity of a text."""

    kind = "sentence"
    own_keys = ("text",)

    text: str = Field(min_length=2)
    """Read from its beginning."""


class CompareProbe(Probe):
    """Compares two texts; by default a value above 0 is expected."""

    kind = "compare"
    own_keys = ("better", "worse")

    prompt: str = ""
    """Text before both; without it, the first token of each does not count, as nothing predicts it."""
    better: str = Field(min_length=1)
    """The text that should be more likely."""
    worse: str = Field(min_length=1)
    """The text that should be less likely."""
    per: Literal["token", "byte", "sum"] = "token"
    """Divisor of the log-likelihoods before they are compared, needed for texts of different length."""

    @model_validator(mode="before")
    @classmethod
    def _default_expectation(cls, values: Any) -> Any:
        if isinstance(values, dict) and not {"at_least", "at_most"} & values.keys():
            return {"at_least": 0.0, **values}
        return values


class FormatProbe(Probe):
    """Whether an answer has a required form: P("{" | "以json输出")."""

    kind = "format"
    own_keys = ("starts_with", "matches", "json", "new_tokens")
    is_probability = True

    prompt: str = Field(min_length=1)
    """Text that asks for the form."""
    starts_with: Texts
    """How an answer in that form begins; for a list, any of the texts."""
    matches: str | None = None
    """Regular expression for the beginning of the greedy answer."""
    as_json: bool = Field(False, alias="json")
    """The greedy answer must begin with a complete JSON object or list."""
    new_tokens: int = Field(64, gt=0)
    """Maximum number of tokens of the greedy answer."""

    @field_validator("matches")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"matches={pattern!r} is not a regular expression ({error})") from None
        return pattern

    @property
    def asks_for_text(self) -> bool:
        """Whether a greedy answer must be generated."""
        return self.as_json or self.matches is not None


KINDS: tuple[type[Probe], ...] = (CompletionProbe, SentenceProbe, CompareProbe, FormatProbe)


def load_probes(wanted: str) -> list[Probe]:
    """Load probes from a file, or from the shipped file of that name."""
    path = find_named_file(wanted, "probes", "probes", ".yaml")
    try:
        content = load_yaml(read_regular(path))
    except BadYaml as error:
        raise ConfigError(str(path), f"not valid YAML ({error})", "Fix the file.") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})", "Use a readable file.") from None
    if not isinstance(content, list) or not content:
        raise ConfigError(str(path), "must be a list of at least one probe", HINT)
    probes: list[Probe] = []
    for number, entry in enumerate(content, start=1):
        probes.append(_parse(entry, f"{path.name}, probe {number}"))
        if probes[-1].name in {probe.name for probe in probes[:-1]}:
            what = f"{path.name}, probe {number}: name {probes[-1].name!r}"
            raise ConfigError(what, "used by an earlier probe", "Use unique names.")
    return probes


def _parse(entry: Any, where: str) -> Probe:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {entry!r}", "must be key: value pairs", HINT)
    where = f"{where} ({entry['name']})" if isinstance(entry.get("name"), str) else where
    kind = _kind_of(entry, where)
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        problem = first_problem(error, kind, HINT)
        what = f"{where}: {problem.what}" if problem.what else where
        raise ConfigError(what, problem.rule, problem.fix or HINT) from None


def _kind_of(entry: dict[Any, Any], where: str) -> type[Probe]:
    fitting = [kind for kind in KINDS if set(kind.own_keys) & entry.keys()]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        named = " and ".join(kind.kind for kind in fitting)
        raise ConfigError(where, f"has keys of several kinds ({named})", "Split it into several probes.")
    deciding = [kind.own_keys[0] for kind in KINDS]
    near = [found for key in entry for found in difflib.get_close_matches(str(key), deciding, n=1)]
    rule = f"its kind is unclear: one of {', '.join(deciding)} is needed"
    raise ConfigError(where, rule, f"Did you mean {near[0]}?" if near else HINT)
