"""Continues prompts with an exported model."""

from pathlib import Path

import torch

from z2all_ds.errors import ConfigError
from z2all_ds.evaluate.loading import load_folder


def continue_prompts(
    folder: Path, prompts: list[str], max_new_tokens: int, temperature: float, top_p: float, seed: int
) -> list[str]:
    """Each prompt with its continuation; greedy at temperature 0."""
    if not temperature >= 0 or not 0 < top_p <= 1 or max_new_tokens < 1:  # `not >=`: NaN too
        raise ConfigError(
            f"temperature={temperature}, top_p={top_p}, max_new_tokens={max_new_tokens}",
            "temperature >= 0, 0 < top_p <= 1, max_new_tokens >= 1",
            "Change them.",
        )
    if not prompts or not all(prompts):
        raise ConfigError(f"prompts {prompts}", "each must hold at least one character", "Give something to continue.")
    model, tokenizer, device = load_folder(folder)
    tokenizer.padding_side = "left"
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    made = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=max_new_tokens,
        **sampling,
    )
    texts: list[str] = tokenizer.batch_decode(made, skip_special_tokens=True)
    return texts
