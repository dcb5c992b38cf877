"""Tests of imports of folders saved by DeepSpeed's own save_checkpoint on one rank, and of every refusal."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch

from tests.helpers import fp16
from tests.helpers.checkpoints import read_whole
from tests.zero.engines import TINY_SHAPE, tiny_engine, train
from tests.zero.state.states import assert_same_state
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.layout import open_checkpoint
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.checkpoint.state_files import StateReader
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.zero.op_builds import prebuild
from z2all_ds.zero.state import import_deepspeed as import_module
from z2all_ds.zero.state.deepspeed_folders import DeepSpeedFolder
from z2all_ds.zero.state.import_deepspeed import import_deepspeed, import_folder
from z2all_ds.zero.state.save import restore, save_checkpoint


def shapes_of(engine: Any) -> dict[str, list[int]]:
    return {name: list(getattr(w, "ds_shape", w.shape)) for name, w in engine.module.named_parameters()}


@contextmanager
def saved_engine(folder: Path, *overrides: str, steps: int = 2, **client_state: Any) -> Iterator[Any]:
    with tiny_engine("cpu", *overrides) as (engine, _):
        train(engine, steps)
        engine.save_checkpoint(str(folder), client_state=client_state)
        yield engine


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        list(DeepSpeedFolder(path).shards(0))
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


CASES: dict[str, list[str]] = {
    **{name: [f"deepspeed={name}"] for name in ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")},
    "tied, zero0": ["deepspeed=zero0", "model.tie_word_embeddings=true"],
    "tied, zero1": ["deepspeed=zero1", "model.tie_word_embeddings=true"],
    "tied, zero3": ["deepspeed=zero3", "model.tie_word_embeddings=true"],
    "biases, zero0": ["deepspeed=zero0", "model.attention_bias=true"],
    "bf16, zero1": ["deepspeed=zero1", "train.precision=bf16"],
    "bf16, zero2": ["deepspeed=zero2", "train.precision=bf16"],
    "bf16, zero3": ["deepspeed=zero3", "train.precision=bf16"],
}


@pytest.mark.parametrize("case", CASES)
def test_imported_state_and_next_losses_are_bit_identical(case: str, tmp_path: Path) -> None:
    if "offload" in case:
        prebuild(["cpu_adam"])
    with saved_engine(tmp_path / "theirs", *CASES[case]) as engine:
        ours = save_checkpoint(engine, tmp_path / "ours", 2, {}, {}, Retention(2))
        source = DeepSpeedFolder(tmp_path / "theirs")
        imported = import_folder(source, tmp_path / "imported", shapes_of(engine), {}, seed=1)
        unbroken = train(engine, 2)
    assert_same_state(ours, imported)
    with tiny_engine("cpu", *CASES[case]) as (engine, _):
        restore(engine, open_checkpoint(imported))
        assert train(engine, 2) == unbroken


def test_a_folder_saved_before_the_first_step_has_only_weights(tmp_path: Path) -> None:
    with saved_engine(tmp_path / "theirs", "deepspeed=zero0", steps=0) as engine:
        imported = import_folder(DeepSpeedFolder(tmp_path / "theirs"), tmp_path / "run", shapes_of(engine), {}, seed=1)
        unbroken = train(engine, 2)
    assert StateReader(imported).state_keys == set()
    with tiny_engine("cpu", "deepspeed=zero2", "train.seed=99") as (engine, _):
        restore(engine, open_checkpoint(imported))
        assert train(engine, 2) == pytest.approx(unbroken, rel=1e-6)


@contextmanager
def other_engine(
    make_optimizer: Callable[[Z2allForCausalLM], Any], stage: int = 0, dtype: str = "fp32"
) -> Iterator[Any]:
    """Yield an engine created only with DeepSpeed, without the optimizer and settings of this package."""
    settings = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": stage}}
    settings |= {"gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}
    settings |= {} if dtype == "fp32" else {dtype: {"enabled": True}}
    with tiny_engine("cpu", "deepspeed=zero0") as (ours, _):
        model = Z2allForCausalLM(Z2allConfig(**ours.module.config.to_dict()))
        engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=settings)
        yield engine


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("named", [False, True])
def test_a_plain_adam_with_one_group_is_imported(stage: int, named: bool, tmp_path: Path) -> None:
    def adam(model: Z2allForCausalLM) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.named_parameters() if named else model.parameters(), lr=0.01)

    with other_engine(adam, stage) as engine:
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path / "theirs"))
    imported = import_folder(DeepSpeedFolder(tmp_path / "theirs"), tmp_path / "run", shapes_of(engine), {}, seed=1)
    reader = StateReader(imported)
    assert reader.index["optimizer"] == "adamw" and reader.index["steps_taken"] == [2, 2]
    for name, weight in engine.module.named_parameters():
        assert torch.equal(read_whole(reader, name), weight)
        if stage == 0:
            assert torch.equal(read_whole(reader, name, "exp_avg"), engine.optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_16_bit_checkpoints_of_plain_deepspeed_are_imported(stage: int, dtype: str, tmp_path: Path) -> None:
    """Imported master weights equal those that DeepSpeed itself returns; the fp16 loss scale is imported."""
    if dtype == "fp16" and not fp16.is_known_here():
        pytest.skip(fp16.WHY_NOT)

    def adam(model: Z2allForCausalLM) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    with other_engine(adam, stage, dtype) as engine:
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path / "theirs"))
        masters: dict[int, torch.Tensor] = {}
        if stage == 0:
            for group, weights in zip(engine.optimizer.fp32_groups, engine.optimizer.fp16_groups, strict=True):
                masters |= {id(weight): master for weight, master in zip(weights, group, strict=True)}
        wanted = {
            name: masters[id(weight)] if stage == 0 else deepspeed.utils.safe_get_full_fp32_param(weight)
            for name, weight in engine.module.named_parameters()
        }
    source = DeepSpeedFolder(tmp_path / "theirs")
    reader = StateReader(import_folder(source, tmp_path / "run", shapes_of(engine), {}, seed=1))
    assert (source.zero_stage, source.dtype) == (stage, dtype)
    for name, master in wanted.items():
        assert torch.equal(read_whole(reader, name), master), name
    assert reader.state_keys == {"exp_avg", "exp_avg_sq"}
    scale = {"cur_scale": 65536, "cur_iter": 2, "last_overflow_iter": -1, "cur_hysteresis": 2}
    assert reader.index["loss_scale"] == (scale if dtype == "fp16" and stage else {})


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9), "an optimizer with states momentum_buffer"),
        (lambda weights: torch.optim.SGD(weights, lr=0.01), "an optimizer with states unlike Adam"),
        (lambda weights: torch.optim.AdamW(weights, amsgrad=True), "an optimizer with states max_exp_avg_sq"),
    ],
)
def test_optimizers_other_than_adam_are_refused(make: Any, line: str, tmp_path: Path) -> None:
    with other_engine(lambda model: make(model.parameters())) as engine:
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path))
    assert f"{line}: only Adam's two moments can be imported" in refusal(tmp_path)


def test_parameter_groups_that_cannot_be_identified_are_refused(tmp_path: Path) -> None:
    def swapped(model: Z2allForCausalLM) -> torch.optim.Optimizer:
        weights = list(model.parameters())
        return torch.optim.AdamW([{"params": weights[5:]}, {"params": weights[:5]}])

    with other_engine(swapped) as engine:
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path))
    assert "parameter groups whose parameters cannot be identified" in refusal(tmp_path)


def test_lion_of_this_package_is_refused(tmp_path: Path) -> None:
    with saved_engine(tmp_path, "deepspeed=zero1", "optimizer.kind=lion"):
        assert "an optimizer with kind lion" in refusal(tmp_path)


class Stranger:
    """A class of objects that a program puts into client_state; loading them would run code."""


class Attribute:
    """An object that is pickled as a call of `getattr`, as early versions of Python 3.11 pickle enum members."""

    def __init__(self, owner: type, name: str) -> None:
        self._call = (getattr, (owner, name))

    def __reduce__(self) -> Any:
        return self._call


def test_a_pickled_call_of_getattr_may_only_load_an_enum_member(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    with saved_engine(tmp_path, "deepspeed=zero1", mine=Attribute(ZeroStageEnum, "weights")):
        assert DeepSpeedFolder(tmp_path)._model["mine"] is ZeroStageEnum.weights
    shutil.rmtree(tmp_path)
    with saved_engine(tmp_path, "deepspeed=zero1", mine=Attribute(LossScaler, "__init__")):
        assert "has objects of getattr, which are not loaded" in refusal(tmp_path)


def test_unknown_classes_in_the_pickle_are_not_loaded(tmp_path: Path) -> None:
    with saved_engine(tmp_path, "deepspeed=zero1", mine=Stranger()):
        line = refusal(tmp_path)
    assert "test_deepspeed_folders.Stranger, which are not loaded" in line
    assert line.endswith("Save it again without them in client_state.")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    with saved_engine(folder, "deepspeed=zero3"):
        return folder


def changed(theirs: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Copy a folder and return the copy, the folder of its tag and the optimizer file in it."""
    copy = tmp_path / "copy"
    shutil.copytree(theirs, copy)
    tag = copy / "global_step2"
    return copy, tag, tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def test_missing_folders_and_folders_not_written_by_deepspeed_are_refused(theirs: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nothing")
    assert "was not written by DeepSpeed's save_checkpoint" in refusal(tmp_path)
    copy, tag, _ = changed(theirs, tmp_path)
    shutil.rmtree(tag)
    assert "names global_step2, which does not exist" in refusal(copy)
    tag.mkdir()
    torch.save({"some": "dict"}, tag / "mp_rank_00_model_states.pt")
    assert "is not a model file of DeepSpeed" in refusal(copy)


def test_damaged_and_incomplete_folders_are_refused(theirs: Path, tmp_path: Path) -> None:
    copy, tag, file = changed(theirs, tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert "cannot be read" in refusal(copy)
    file.unlink()
    assert "is incomplete: the file of rank 0 is missing" in refusal(copy)
    for name in (file.name, f"bf16_{file.name}"):
        (tag / name).write_bytes(content)
    assert "files of two saves" in refusal(copy)


def test_a_folder_without_the_file_of_one_rank_is_refused(theirs: Path, tmp_path: Path) -> None:
    copy, _, file = changed(theirs, tmp_path)
    with torch.serialization.safe_globals(_all_classes()):
        content = torch.load(file, weights_only=True)
    content["optimizer_state_dict"]["partition_count"] = 2
    torch.save(content, file)
    source = DeepSpeedFolder(copy)
    with pytest.raises(CheckpointError, match="the file of rank 1 is missing"):
        import_folder(source, tmp_path / "run", source.shapes, {}, seed=1)
    assert not (tmp_path / "run").exists()


def _all_classes() -> list[Any]:
    from z2all_ds.zero.state.deepspeed_folders import _classes_in_files

    return _classes_in_files()


def test_another_model_and_an_existing_or_older_step_are_refused(theirs: Path, tmp_path: Path) -> None:
    source = DeepSpeedFolder(theirs)
    shapes = source.shapes
    for changes, line in [
        ({"lm_head.weight": [65, 32]}, "shape of lm_head.weight is [64, 32]: in the configured model it is [65, 32]"),
        ({"other": [3]}, "shape of other is missing: in the configured model it is [3]"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            import_folder(source, tmp_path, {**shapes, **changes}, {}, seed=1)
        assert line in str(caught.value)
    import_folder(source, tmp_path, shapes, {}, seed=1)
    with pytest.raises(CheckpointError, match="step_00000002: exists"):
        import_folder(source, tmp_path, shapes, {}, seed=1)
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000007")
    with pytest.raises(CheckpointError, match="is older than step_00000007"):
        import_folder(source, tmp_path, shapes, {}, seed=1)


def test_an_import_ends_the_lineage_of_a_killed_run(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed run has a later step in memory, from which it would resume instead."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(import_module, "open_tokenizer", lambda run: SimpleNamespace(model_token_ids={}))
    monkeypatch.setattr(import_module, "_data_state", lambda *source: ({"position": 16}, "data: continues"))
    run, snapshots = RunFolder(tmp_path / "run"), memory.SnapshotFolder(memory.new_lineage())
    run.root.mkdir()
    snapshots.create(run.root)
    try:
        snapshots.finish(0, 900, {})
        memory.write_lineage(run, snapshots)
        config = tmp_path / "run.yaml"
        config.write_text("{}")
        first, *_ = import_deepspeed(theirs, None, str(config), [*TINY_SHAPE, f"run_dir={run.root}"])
        assert first.startswith(f"{run.checkpoints}/step_00000002: step 2")
        assert memory.snapshot_folder(run) is None and not snapshots.path.exists()
    finally:
        snapshots.remove()


def test_random_generators_are_seeded(theirs: Path, tmp_path: Path) -> None:
    made = import_folder(DeepSpeedFolder(theirs), tmp_path, DeepSpeedFolder(theirs).shapes, {}, seed=11)
    saved = torch.load(made / "rng_rank_0000.pt", weights_only=True)
    assert torch.equal(saved["torch"], torch.manual_seed(11).get_state())


def test_the_manifest_lists_all_files(theirs: Path, tmp_path: Path) -> None:
    source = DeepSpeedFolder(theirs)
    made = import_folder(source, tmp_path, source.shapes, {"position": 1}, seed=1)
    files = set(json.loads((made / "MANIFEST.json").read_text())["files"])
    state = {"state/index.json", "state/rank_00000.safetensors"}
    assert files == {*state, "data_state.json", "rng_rank_0000.pt", "trainer.json"}
