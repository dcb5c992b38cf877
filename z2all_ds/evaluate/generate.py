"""Continuations of prompts, or answers to messages, with transformers' generate: greedy or sampled, in batches."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError
from z2all_ds.evaluate.loading import LoadedModel
from z2all_ds.evaluate.prompts import Answer, Message, chat_ids, end_of_turn, is_chat, plain_ids, require_unicode

Write = Callable[[str], None]
ENDED, STOPPED, CUT = "end", "stop", "length"
"""Why an answer ended: by the model, by a stop string, or by the length limit."""
FURTHER_TOKENS = 8
"""Tokens searched for a stop string in addition to one per byte of it: control tokens have no text."""
FILLER_ID = 0
"""Input for rows that end before others of their batch; cut off afterwards, so any token will do."""
INCOMPLETE = "\ufffd"
"""The decoded form of an incomplete character."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are selected."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "must be at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "must be 0 or above"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "must be 0 (all) or above"),
            ("min_p", 0 <= self.min_p <= 1, "must be from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "must be above 0 (1: none)"),
            ("stop", all(self.stop), "must have at least one character"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)}", rule, "Change it.")
        for one in self.stop:
            require_unicode(one, "a stop string")


# Streaming: never half a character, and nothing of a stop string or after it


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there was one."""
    found = [start for start in map(text.find, stops) if start >= 0]
    return (text[: min(found)], True) if found else (text, False)


def stable_part(text: str, stops: Sequence[str]) -> str:
    """Return the text without the end that the next token may change: half a character, or the start of a stop."""
    text = text.rstrip(INCOMPLETE)
    for length in range(max(map(len, stops), default=0), 0, -1):
        if any(len(stop) > length and text.endswith(stop[:length]) for stop in stops):
            return text[:-length]
    return text


class TextStream:
    """A streamer for transformers' generate, for one sequence."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str], write: Write) -> None:
        self._decode, self._stops, self._write = decode, stops, write
        self._ids: list[int] = []
        self._shown = 0
        self._has_prompt = False

    def put(self, value: Any) -> None:
        """Receive first the prompt, then token by token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._ids += value.reshape(-1).tolist()
        self._show(is_over=False)

    def end(self) -> None:
        self._show(is_over=True)

    def _show(self, is_over: bool) -> None:
        text, is_stopped = cut_at_stop(self._decode(self._ids), self._stops)
        ready = text if is_over or is_stopped else stable_part(text, self._stops)
        if len(ready) > self._shown:
            self._write(ready[self._shown :])
            self._shown = len(ready)


class StopCheck:
    """A stopping criterion for transformers' generate: ends a row when its new text contains a stop string.

    Only the tail is decoded at each token. transformers remembers which rows have ended; under beam search a row is a
    different beam at every token.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], prompt_tokens: int, skip_special_tokens: bool = False
    ) -> None:
        self.stopped_at: dict[int, int] = {}
        """Number of new tokens at which each row first had a stop string."""
        self._tokenizer, self._stops = tokenizer, stops
        self._prompt_tokens, self._skip = prompt_tokens, skip_special_tokens
        self._tail_tokens = max((len(stop.encode()) for stop in stops), default=0) + FURTHER_TOKENS

    def __call__(self, ids_BT: Tensor, _scores: Any, **_unused: Any) -> Tensor:
        new_BT = ids_BT[:, self._prompt_tokens :]
        tails = new_BT[:, -self._tail_tokens :].tolist()
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=self._skip)
        are_over = [cut_at_stop(text, self._stops)[1] for text in texts]
        for row, is_over in enumerate(are_over):
            if is_over:
                self.stopped_at.setdefault(row, new_BT.shape[1])
        return torch.tensor(are_over, device=ids_BT.device)


# Generation


@dataclass
class Generator:
    """A model with sampling settings. `chat`: prompts are messages of a user (None: the tokenizer decides).
    `control_tokens`: control tokens in prompts are parsed; otherwise they are plain text."""

    loaded: LoadedModel
    sampling: Sampling
    chat: bool | None = None
    system: str | None = None
    control_tokens: bool = False

    def __post_init__(self) -> None:
        self.is_chat = is_chat(self.loaded.tokenizer, self.chat)
        if self.system is not None and not self.is_chat:
            raise ConfigError("--system", "requires chat mode", "Add --chat, or omit it.")
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        named = model.generation_config.eos_token_id
        ends = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id}
        if self.is_chat:
            ends.add(end_of_turn(tokenizer))
        # A control token has no text to search for: a stop string that is one is treated as an end token.
        added = tokenizer.get_added_vocab()
        self._stop_ids = {added[stop] for stop in self.sampling.stop if stop in added}
        self._ends = sorted({end for end in ends if end is not None} | self._stop_ids)
        self._seeded = False

    def conversation(self, prompt: str) -> list[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": prompt}]

    def ids_of(self, prompt: str) -> list[int]:
        if self.is_chat:
            return chat_ids(self.loaded.tokenizer, self.conversation(prompt), self.control_tokens)
        return plain_ids(self.loaded.tokenizer, prompt, self.control_tokens)

    def answer_all(self, prompts: Sequence[str], batch: int = 8, num: int = 1) -> Iterator[Answer]:
        """Yield `num` answers to each prompt, in order, `batch` at a time; all prompts are checked first.

        A prompt without room for all new tokens is generated separately, or it would limit the others of its batch.
        """
        if batch < 1 or num < 1:
            raise ConfigError(f"batch={batch}, num={num}", "must be at least 1", "Use larger numbers.")
        checked = [(prompt, self._fitting(self.ids_of(prompt))) for prompt in prompts]
        asked = [(prompt, ids, sample) for prompt, ids in checked for sample in range(num)]
        for is_tight, some in groupby(asked, lambda one: self._room(one[1]) < self.sampling.max_new_tokens):
            while group := list(islice(some, 1 if is_tight else batch)):
                made = self._generate([ids for _, ids, _ in group])
                for (prompt, ids, sample), new in zip(group, made, strict=True):
                    text, finish = self._read(ids, new)
                    yield Answer(prompt, text, finish, len(new), sample)

    def stream(self, prompt: str, write: Write, ids: list[int] | None = None) -> Answer:
        """Return one answer; write its text as it is generated. `ids`: of a whole conversation that ends with it."""
        ids = self._fitting(ids or self.ids_of(prompt))
        stream = TextStream(lambda new: self._text(ids, self._before_end(new)), self.sampling.stop, write)
        (new,) = self._generate([ids], stream)
        text, finish = self._read(ids, new)
        return Answer(prompt, text, finish, len(new))

    def _fitting(self, ids: list[int]) -> list[int]:
        if not ids:
            raise ConfigError("a prompt", "the tokenizer encodes it to no tokens", "Use another text.")
        self.loaded.require_token(max(ids))
        room = self._room(ids)
        if room < 1:
            rule = f"{self.loaded.label} supports at most {self.loaded.max_tokens} including the answer"
            raise ConfigError(f"a prompt of {len(ids)} tokens", rule, "Shorten it.")
        if room < self.sampling.max_new_tokens:
            say(f"only {room} new tokens: the model supports {self.loaded.max_tokens}, the prompt has {len(ids)}")
        return ids

    def _room(self, ids: list[int]) -> int:
        return self.loaded.max_tokens - len(ids)

    def _generate(self, rows: list[list[int]], stream: TextStream | None = None) -> list[list[int]]:
        """Return the new tokens of each row, including its end token."""
        from transformers import StoppingCriteriaList

        if not self._seeded:
            torch.manual_seed(self.sampling.seed)
            self._seeded = True
        longest = max(map(len, rows))
        # Padded with a token of the row: any other would be penalised as a repetition.
        ids_BT = torch.tensor([[row[0]] * (longest - len(row)) + row for row in rows], device=self.loaded.device)
        mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=ids_BT.device)
        stop = StopCheck(self.loaded.tokenizer, self.sampling.stop, longest, skip_special_tokens=True)
        with torch.no_grad():
            made = self.loaded.model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                generation_config=self._config(min(self.sampling.max_new_tokens, self.loaded.max_tokens - longest)),
                stopping_criteria=StoppingCriteriaList([stop] if self.sampling.stop else []),
                streamer=stream,
            )
        new = enumerate(made[:, longest:].tolist())
        return [self._before_end(ids[: stop.stopped_at.get(row)], keep_end=True) for row, ids in new]

    def _config(self, max_new_tokens: int) -> Any:
        """Return the config; options not set are off, since the model's own config has only ids (see loading)."""
        from transformers import GenerationConfig

        how, choice = self.sampling, {}
        if how.temperature:
            choice = {"temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k}
            choice |= {"min_p": how.min_p} if how.min_p else {}
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=bool(how.temperature),
            repetition_penalty=how.repetition_penalty,
            eos_token_id=self._ends or None,
            pad_token_id=FILLER_ID,
            **choice,
        )

    def _before_end(self, new: list[int], keep_end: bool = False) -> list[int]:
        end = next((index for index, token in enumerate(new) if token in self._ends), len(new))
        return new[: end + keep_end]

    def _read(self, prompt_ids: list[int], new: list[int]) -> tuple[str, str]:
        text, is_stopped = cut_at_stop(self._text(prompt_ids, self._before_end(new)), self.sampling.stop)
        last = new[-1] if new else None
        is_stopped = is_stopped or last in self._stop_ids
        return text, STOPPED if is_stopped else ENDED if last in self._ends else CUT

    def _text(self, prompt_ids: list[int], new: list[int]) -> str:
        """Decode together with the prompt, or some tokenizers would lose a leading space."""
        before: str = self.loaded.tokenizer.decode(prompt_ids, skip_special_tokens=True)
        whole: str = self.loaded.tokenizer.decode([*prompt_ids, *new], skip_special_tokens=True)
        if whole.startswith(before):
            return whole[len(before) :]
        alone: str = self.loaded.tokenizer.decode(new, skip_special_tokens=True)
        return alone
