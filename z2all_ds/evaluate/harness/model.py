"""Adapts models to lm-evaluation-harness: likelihoods of continuations and texts, and generation until a stop.

Prompts are encoded, cut and scored as by the harness's own `hf` model (tests compare), but without accelerate, with
log-probabilities in fp32 for any weights, computed only at scored positions, and with this package's progress display.
Only `evaluate harness` loads this module.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn import functional
from transformers import StoppingCriteriaList

from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.evaluate.encoding import additions, hidden_messages, hide_control_tokens, rendered_ids, text_ids
from z2all_ds.evaluate.generate import StopCheck
from z2all_ds.evaluate.loading import LoadedModel
from z2all_ds.evaluate.windows import AUTO, bos_id_of

MAX_NEW_TOKENS = 256
"""Default of tasks that set no limit, as in the harness."""
SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Settings in a task's generation_kwargs that transformers would warn about without sampling."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
PASSED_ON = (
    *("do_sample", *SAMPLING_ONLY, "num_beams", "early_stopping"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
)
"""Settings in a task's generation_kwargs for transformers, some of whose others run code (custom_generate)."""
Request = tuple[Any, list[int], list[int]]
"""(key, tokens of the context, tokens of the continuation)."""
Tokens = tuple[int, ...]
Answer = TypeVar("Answer")


class HarnessModel(TemplateLM):
    """A loaded model. `before_first` is called before the requests of each kind."""

    tokenizer_name = ""
    """The harness uses it only in the names of cached requests, which are off."""

    def __init__(self, loaded: LoadedModel, batch_size: int, before_first: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.model, self.tokenizer, self._device = loaded.model, loaded.tokenizer, loaded.device
        self.batch_size, self.before_first = batch_size, before_first
        # Some configs, such as Bloom's, do not set it.
        self.max_length = resolve_max_length(loaded.model.config, loaded.tokenizer)
        self.prompts_cut = 0
        self._is_chat = False
        self._hidden: dict[str, str] = {}
        """Control tokens that messages spell out, by the marks in their place (see encoding.py)."""
        pad = self.tokenizer.pad_token_id
        self.pad_token_id = int(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @cached_property
    def _additions(self) -> tuple[list[int], list[int]]:
        return additions(self.tokenizer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        self._is_chat = True
        text: str = self.tokenizer.apply_chat_template(
            hidden_messages(self.tokenizer, chat_history, self._hidden),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids; only a chat template makes control tokens."""
        how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if not self._is_chat:
            return text_ids(self.tokenizer, string) if add_special_tokens is False else self._whole_text_ids(string)
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])):
            how["add_special_tokens"] = False  # a chat template has added it
        if any(mark in string for mark in self._hidden):
            bos_id = bos_id_of(self.tokenizer, AUTO) if how.get("add_special_tokens", True) else None
            return [*([] if bos_id is None else [bos_id]), *rendered_ids(self.tokenizer, string, self._hidden)]
        ids: list[int] = self.tokenizer.encode(string, **how)
        return ids

    def _whole_text_ids(self, text: str) -> list[int]:
        before, after = self._additions
        return [*before, *text_ids(self.tokenizer, text), *after]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self._is_chat:  # an answer is not part of the template
            continuation = hide_control_tokens(self.tokenizer, continuation, self._hidden)
        pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
        return pair

    # Likelihoods

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self.before_first()
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return log-likelihoods of whole texts, in windows, each token once with as much context as fits."""
        self.before_first()
        pieces: list[Request] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self._whole_text_ids(request.args[0]),  # never rendered by the chat template
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pieces += [(number, *make_disjoint_window(window)) for window in windows]
        sums = [0.0] * len(requests)
        for (number, _, _), (nats, _) in zip(pieces, self._loglikelihood_tokens(pieces), strict=True):
            sums[number] += nats
        return sums

    def _loglikelihood_tokens(self, requests: list[Request], **_: Any) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy decoding would give it) of every continuation."""
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        readers: dict[Tokens, list[int]] = defaultdict(list)  # options of one token share one forward pass
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"an answer of {len(continuation)} tokens",
                    f"exceeds the model's window of {self.max_length}",
                    "Omit the task, or use a model with a longer window.",
                )
            self.prompts_cut += len(context) + len(continuation) > self.max_length + 1
            readers[tuple((context + continuation)[-(self.max_length + 1) : -1])].append(number)
        inputs = sorted(readers, key=len, reverse=True)  # longest first, so that lack of memory shows at once

        def score(batch: list[Tokens]) -> list[list[tuple[float, bool]]]:
            return self._score(batch, [[requests[number][2] for number in readers[ids]] for ids in batch])

        with progress("likelihoods", len(requests), "requests") as advance:
            for ids, scores in self._in_batches(inputs, score):
                for number, answer in zip(readers[ids], scores, strict=True):
                    answers[number] = answer
                advance(len(scores))
        return answers

    @torch.inference_mode()
    def _score(self, batch: list[Tokens], wanted: list[list[list[int]]]) -> list[list[tuple[float, bool]]]:
        """Return (log-likelihood, whether greedy) of each wanted continuation at the end of each input."""
        longest = max(map(len, batch))
        padded = [[*ids, *[self.pad_token_id] * (longest - len(ids))] for ids in batch]
        logits = self.model(input_ids=torch.tensor(padded, device=self._device)).logits  # [batch, length, vocabulary]
        scores: list[list[tuple[float, bool]]] = []
        for row, ids in enumerate(batch):
            scores.append([])
            for continuation in wanted[row]:
                tokens = torch.tensor(continuation, device=self._device)
                scored = logits[row, len(ids) - len(tokens) : len(ids)]
                log_probabilities = functional.log_softmax(scored.float(), -1)
                nats = log_probabilities.gather(-1, tokens[:, None]).sum()
                greedy = (log_probabilities.argmax(-1) == tokens).all()
                scores[row].append((float(nats), bool(greedy)))
        return scores

    def _in_batches(
        self, inputs: list[Tokens], run: Callable[[list[Tokens]], list[Answer]]
    ) -> Iterator[tuple[Tokens, Answer]]:
        """Yield (input, result of `run`), in order. If memory does not suffice, batches are halved from then on."""
        done = 0
        while done < len(inputs):
            batch = inputs[done : done + self.batch_size]
            answers: list[Answer] | None = None
            try:
                answers = run(batch)
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise MachineError(
                        f"a prompt of {len(batch[0])} tokens", "does not fit into GPU memory", "Free GPU memory."
                    ) from error
            if answers is None:  # after the except block: the error holds the tensors of the failed attempt
                torch.cuda.empty_cache()
                self.batch_size = len(batch) // 2
                say(f"{len(batch)} prompts at a time do not fit into memory: {self.batch_size} from now on")
                continue
            yield from zip(batch, answers, strict=True)
            done += len(batch)

    # Generation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        self.before_first()
        groups: dict[str, list[int]] = defaultdict(list)
        prompts = [tuple(self.tok_encode(request.args[0])) for request in requests]
        for number, request in enumerate(requests):
            _refuse_other_settings(request.args[1])
            groups[repr(sorted(request.args[1].items()))].append(number)
        answers = [""] * len(requests)
        with progress("generation", len(requests), "requests") as advance:
            for numbers in groups.values():
                numbers.sort(key=lambda number: -len(prompts[number]))
                how = dict(normalize_gen_kwargs(requests[numbers[0]].args[1], MAX_NEW_TOKENS))
                new_tokens = how.pop("max_gen_toks")
                if new_tokens >= self.max_length:
                    new_tokens = self.max_length // 2  # leave room for the prompt
                room = self.max_length - new_tokens
                self.prompts_cut += sum(len(prompts[number]) > room for number in numbers)
                inputs = [prompts[number][-room:] for number in numbers]
                texts = self._in_batches(inputs, partial(self._generate, new_tokens=new_tokens, how=how))
                for number, (_, text) in zip(numbers, texts, strict=True):
                    answers[number] = text
                    advance(1)
        return answers

    def _generate(self, prompts: list[Tokens], new_tokens: int, how: Mapping[str, Any]) -> list[str]:
        """Return the continuation of each prompt. `how`: a task's generation_kwargs without the number of tokens."""
        eos = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        stops = [stop for stop in handle_stop_sequences(list(how["until"]), eos=eos) if stop]
        unused = {"until"} if how["do_sample"] else {"until", *SAMPLING_ONLY}
        longest = max(map(len, prompts))
        padded = [[*[self.pad_token_id] * (longest - len(ids)), *ids] for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        try:
            made = self.model.generate(
                input_ids=torch.tensor(padded, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=new_tokens,
                pad_token_id=self.pad_token_id,
                stopping_criteria=StoppingCriteriaList([StopCheck(self.tokenizer, stops, longest)]),
                **{name: value for name, value in how.items() if name not in unused},
            )
        except (TypeError, ValueError) as error:
            line = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"generation_kwargs {dict(how)}", f"do not work ({line})", "Fix them in the task's YAML."
            ) from error
        texts = self.tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def report_cut_prompts(self) -> None:
        if self.prompts_cut:
            say(f"{self.prompts_cut} prompts exceeded the model's {self.max_length} tokens: cut on the left")


def _refuse_other_settings(how: Mapping[str, Any]) -> None:
    known = ("until", *LENGTHS, *PASSED_ON)
    if other := next((name for name in how if name not in known), None):
        rule = f"is not a setting that tasks may use ({', '.join(known)})"
        raise ConfigError(f"generation_kwargs: {other}", rule, "Remove it from the task's YAML.")
