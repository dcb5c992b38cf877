"""An exported folder as model and tokenizer on the best device here."""

from pathlib import Path
from typing import Any

import torch

from z2all_ds.errors import DataError


def load_folder(folder: Path) -> tuple[Any, Any, torch.device]:
    """Model (eval mode), tokenizer, device."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import z2all_ds.model  # noqa: F401 - for exports in our own format: registers the model

    if not (folder / "config.json").is_file():
        raise DataError(
            f"model {folder}", "no Hugging Face folder (no config.json)", "Give an export: `z2all export RUN`."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # On a CPU bf16 products are some 100 times slower than fp32 ones.
    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise DataError(f"model {folder}", f"does not load ({first_line})", "Export it again.") from error
    return model.to(device).eval(), tokenizer, device
