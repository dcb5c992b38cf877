"""Tests for exported folders: they load with the weights of the checkpoint; mistakes raise one-line errors."""

import json
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.helpers.checkpoints import STEP, checkpoint_of, read_weights, write_checkpoint, write_run
from tests.helpers.command import COMMAND, environment, one_line, z2all
from tests.helpers.marked import wait_until
from tests.helpers.models import TINY
from tests.helpers.processes import ended
from tests.helpers.stock_names import to_stock
from z2all_ds.base.atomic_folder import UNFINISHED
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import CheckpointError, ConfigError, ExportError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.fixed_tokens import Probe, fixed_tokens
from z2all_ds.export import to_hf
from z2all_ds.export.model_card import NAMES
from z2all_ds.export.to_hf import export_checkpoint
from z2all_ds.export.weights import WeightReader
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer

NAME = f"step_{STEP:08d}"
SETTINGS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}


@pytest.fixture(scope="module")
def run(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("to_hf") / "run", TINY, small_corpus, small_tokenizer)


@pytest.fixture(scope="module")
def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return read_weights(checkpoint_of(run))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_command_writes_shards_in_llama_format(run: RunFolder, weights: dict[str, torch.Tensor]) -> None:
    answer = z2all("export", run.root, "--max-shard-size", "100KB", cwd=run.root)
    assert answer.returncode == 0, answer.stderr
    folder = run.exports / NAME
    assert answer.stdout.startswith(f"{folder}: step 7, 88,736 parameters, logits within ")
    assert "(from_pretrained); peak memory " in answer.stdout
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert SETTINGS | shards | {"model.safetensors.index.json"} <= names(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM and model.dtype == torch.bfloat16
    expected = to_stock(weights, model.config)
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor.bfloat16()), name
    assert len(AutoTokenizer.from_pretrained(folder)) > 1000
    card = (folder / "README.md").read_text()
    assert "| step | 7 of 10 |" in card and "in a fresh process without z2all_ds" in card


def test_the_z2all_format_has_its_own_parameter_names_and_class(
    run: RunFolder, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    report = export_checkpoint(checkpoint_of(run), tmp_path / "own", "fp32", model_format="z2all")
    assert report.folder == tmp_path / "own" and report.step == STEP and report.parameters == 88_736
    assert report.verdict.max_relative_difference <= 1e-6 and len(report.verdict.generated) == 3
    assert names(report.folder) >= SETTINGS | {"model.safetensors"}
    config = json.loads((report.folder / "config.json").read_text())
    assert config["model_type"] == "z2all" and config["architectures"] == ["Z2allForCausalLM"]
    for kind in (Z2allForCausalLM, AutoModelForCausalLM):
        model = kind.from_pretrained(report.folder)
        assert type(model) is Z2allForCausalLM
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    assert "with z2all_ds" in (report.folder / "README.md").read_text()
    text = z2all("generate", report.folder, "-p", "def main():", "--max-new-tokens", "2", cwd=tmp_path)
    assert text.returncode == 0, text.stderr


def test_large_models_are_verified_layer_by_layer(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_hf, "fits_whole", lambda parameters: False)
    report = export_checkpoint(run.root, tmp_path / "large", "fp16", "50KB", "z2all")
    assert report.verdict.how == "layer by layer" and report.verdict.max_relative_difference <= 1e-6
    assert "Loaded layer by layer in a fresh process" in (report.folder / "README.md").read_text()


def test_wrong_weights_leave_no_export(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification reads the checkpoint again; here it reads values that differ from those written."""
    honest = WeightReader.read_rounded

    def damaged(reader: WeightReader, parameter: str, dtype: torch.dtype) -> torch.Tensor:
        return honest(reader, parameter, dtype) * (1.01 if parameter.endswith("1.mlp.down_proj.weight") else 1.0)

    monkeypatch.setattr(WeightReader, "read_rounded", damaged)
    with pytest.raises(ExportError, match="text differ by"):
        export_checkpoint(run.root, tmp_path / "parent" / "model")
    assert names(tmp_path / "parent") == set()


def test_the_loss_must_be_that_of_the_training(
    run: RunFolder, weights: dict[str, torch.Tensor], small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    """A checkpoint stores its loss on fixed tokens; an export of other weights or another model has another loss."""
    model = Z2allForCausalLM(Z2allConfig.from_section(TINY)).eval()
    model.load_state_dict(weights)
    ids = fixed_tokens(TINY.vocab_size, 32)
    with torch.no_grad():
        loss = model(input_ids=ids[:, :-1], next_tokens=ids[:, 1:]).losses.double().mean().item()
    trained = write_run(tmp_path / "run", TINY, small_corpus, small_tokenizer, 1)
    probe = Probe(32, "fp32", loss)
    for step, measured in ((STEP, probe), (STEP + 1, replace(probe, loss=loss * 1.001))):
        write_checkpoint(trained, TINY, step, probe=measured.as_record())
    report = export_checkpoint(checkpoint_of(trained), dtype="fp32")
    assert report.verdict.loss_difference is not None and report.verdict.loss_difference < 1e-6
    assert "Their loss on fixed tokens is within" in (report.folder / "README.md").read_text()
    with pytest.raises(ExportError, match="was measured when the checkpoint was saved"):
        export_checkpoint(checkpoint_of(trained, STEP + 1), dtype="fp32")
    assert names(trained.exports) == {NAME}


def test_the_model_and_the_tokenizer_are_those_of_the_training(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    """run.yaml may have been changed after the checkpoint was saved, and a tokenizer trained again in its folder."""
    trained = write_run(tmp_path / "run", TINY, small_corpus, small_tokenizer, 1)
    write_checkpoint(trained, TINY, STEP, model=TINY.model_dump(mode="json"))
    trained.config.write_text(trained.config.read_text().replace("rope_theta: 10000.0", "rope_theta: 77.0"))
    assert "rope_theta: 77.0" in trained.config.read_text()
    report = export_checkpoint(checkpoint_of(trained), dtype="fp32")
    assert json.loads((report.folder / "config.json").read_text())["rope_parameters"]["rope_theta"] == 10000.0
    run, checkpoint = load_run_config(str(trained.config)), layout.open_checkpoint(checkpoint_of(trained))
    state = {**checkpoint.data_state, "tokenizer_fingerprint": "of another"}
    (checkpoint.path / layout.DATA_STATE).write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=f"is not the one that {NAME} was trained with"):
        to_hf.checkpoint_config(run, checkpoint, load_tokenizer(small_tokenizer))


def test_ctrl_c_leaves_no_files(run: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "parent" / "model"
    command = [*COMMAND, "export", str(run.root), "--out", str(out)]
    pipe = subprocess.PIPE
    with ended(subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True)) as process:
        wait_until(lambda: bool(list(out.parent.glob(f"*{UNFINISHED}/tokenizer.json"))), "a half-written export")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) not in (0, None)
    assert names(out.parent) == set()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--format", "gguf"), "ConfigError: format gguf: no such format. Known: llama, z2all."),
        (("--dtype", "int4"), "ConfigError: dtype int4: no such dtype. Known: fp32, bf16, fp16."),
        (("--max-shard-size", "big"), "ConfigError: memory size 'big': must be a number with a unit"),
    ],
)
def test_invalid_options_are_refused(options: tuple[str, ...], words: str, run: RunFolder) -> None:
    assert one_line(z2all("export", run.root, *options, cwd=run.root), 2).startswith(words)


CARD = f"---\n---\n\n# {NAMES['llama']}\n"


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({"thesis.txt": "ten years of work"}, "has thesis.txt, which is not part of an export"),
        ({"config.json": "{}", "README.md": CARD, ".git/HEAD": "main"}, "has .git, which is not part of an export"),
        ({"README.md": CARD, "tokenizer.model/notes": "x"}, "has tokenizer.model, which is not part of an export"),
        ({"config.json": "{}", "model.safetensors": "x", "README.md": "# Their model"}, "exists and is not an export"),
        ({"config.json": "{}", "model.safetensors": "x"}, "exists and is not an export"),
    ],
)
def test_only_exports_are_replaced(files: dict[str, str], rule: str, run: RunFolder, tmp_path: Path) -> None:
    """Not other files, a repository with an export in it, or the model of somebody else."""
    for name, text in files.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(text)
    with pytest.raises(ConfigError, match=rule):
        export_checkpoint(run.root, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files


def test_what_appears_during_an_export_is_not_replaced(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(temporary: Path, *_: object) -> tuple[int, None]:
        (tmp_path / "out" / ".git").mkdir(parents=True)
        (tmp_path / "out" / "notes.md").write_text("mine")
        return 0, None

    monkeypatch.setattr(to_hf, "_fill", fill)
    with pytest.raises(ConfigError, match=r"has \.git, which is not part of an export"):
        export_checkpoint(run.root, tmp_path / "out")
    assert names(tmp_path) == {"out"} and names(tmp_path / "out") == {".git", "notes.md"}


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        export_checkpoint(tmp_path)
