"""Opening a folder: what comes out, and one line for what is broken."""

import shutil
from pathlib import Path

import pytest
import torch

from z2all_ds.errors import DataError
from z2all_ds.evaluate.loading import load_folder


def test_model_tokenizer_device(model_folder: Path) -> None:
    model, tokenizer, device = load_folder(model_folder)
    assert not model.training
    assert {parameter.device.type for parameter in model.parameters()} == {device.type}
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert tokenizer.decode(tokenizer("你好")["input_ids"]) == "你好"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the folder's own dtype is kept")
def test_bf16_folder_computes_in_fp32_on_a_cpu(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bf16"
    model, tokenizer, _ = load_folder(model_folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded, _, _ = load_folder(folder)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "nonesuch"}'),
        ("model.safetensors", "junk"),
        ("model.safetensors", None),
        ("tokenizer.json", "{"),
    ],
)
def test_broken_folder_is_one_line(model_folder: Path, tmp_path: Path, name: str, content: str | None) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_folder(folder)
    message = str(caught.value)
    assert message.startswith(f"model {folder}: does not load (")
    assert message.endswith("Export it again.")
    assert "\n" not in message
