"""A tiny model that has memorised the answers of benchmark tasks and nothing else, and these tasks."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from z2all_ds.evaluate.harness.model import HarnessModel
from z2all_ds.evaluate.harness.tasks import load_tasks, quiet, require_harness
from z2all_ds.evaluate.loading import LoadedModel

TASKS = Path(__file__).resolve().parents[1] / "assets" / "harness"
WINDOW_TOKENS = 256
CPU = torch.device("cpu")


@cache
def _data_cache() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory()  # removed when the process ends


def load(*names: str) -> dict[str, Any]:
    """Load new tasks from the tests' own YAML files; the converted data stays out of the user's cache."""
    require_harness()
    datasets.config.HF_DATASETS_CACHE = _data_cache().name
    with quiet():
        return load_tasks(list(names), TASKS)


def en_school_with_an_odd_question() -> dict[str, Any]:
    """Return `en_school` with one question whose prompt differs from the text of its document.

    It is the second to last, so it is not among the documents that are checked in advance.
    """
    loaded = load("en_school")
    task = loaded["tasks"]["en_school"]
    task._config.doc_to_text = (
        "{{question}}\nA) {{choices[0].split() | join(' ')}}\nB) {{choices[1]}}\nC) {{choices[2]}}\nAnswer:"
    )
    task.fewshot_cfg.doc_to_text, task.fewshot_cfg.split = task._config.doc_to_text, "test"
    documents = list(task.eval_docs)
    documents[-2] = {**documents[-2], "choices": ["two  words", *documents[-2]["choices"][1:]]}
    task.dataset, task.sampler.df = {"test": documents}, documents
    return loaded


def tiny_llama(tokenizer: Any, seed: int = 0, window_tokens: int = WINDOW_TOKENS) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window_tokens,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval()


@cache
def untrained(tokenizer_folder: Path, seed: int = 5) -> LoadedModel:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    return LoadedModel(tiny_llama(tokenizer, seed), tokenizer, CPU, "untrained", None)


@cache
def memorised(tokenizer_folder: Path) -> LoadedModel:
    """Return a model that knows the letters of zh_school and en_school and the answers of sums."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    model = tiny_llama(tokenizer)
    encode = HarnessModel(LoadedModel(model, tokenizer, CPU, "", None), batch_size=1)._encode_pair
    tasks = load("zh_school", "en_school", "sums")["tasks"]
    pairs = []
    for name, end in (("zh_school", ""), ("en_school", ""), ("sums", ";")):
        task = tasks[name]
        for document in task.eval_docs:
            answer = task.doc_to_target(document)
            text = answer if isinstance(answer, str) else task.doc_to_choice(document)[answer]
            pairs.append(encode(task.fewshot_context(document, num_fewshot=0), f" {text}{end}"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small matrix products are slower with two threads
    try:
        learn_by_heart(model, pairs)
    finally:
        torch.set_num_threads(threads)
    return LoadedModel(model, tokenizer, CPU, "memorised", None)


def learn_by_heart(model: Any, pairs: list[tuple[list[int], list[int]]], max_steps: int = 400) -> None:
    """Train until the model assigns a probability of at least 95 % to every token of every answer."""
    longest = max(len(context) + len(answer) for context, answer in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (context, answer) in enumerate(pairs):
        ids[row, : len(context) + len(answer)] = torch.tensor(context + answer)
        labels[row, len(context) : len(context) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.0)
    rows, columns = (labels[:, 1:] != -100).nonzero(as_tuple=True)
    wanted = labels[rows, columns + 1]
    for _ in range(max_steps):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[rows, columns]
        losses = functional.cross_entropy(model.lm_head(hidden), wanted, reduction="none")
        if losses.max() < 0.05:
            return
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    raise AssertionError(f"not learnt in {max_steps} steps: {losses.max():.3f}")
