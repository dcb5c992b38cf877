"""Training on a single GPU with the shipped JSONs, unchanged: losses fall and, except in fp16, stay close to fp32."""

import pytest
import torch

from tests.ops.comparing import on_gpu
from tests.zero.engines import tiny_engine, train
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.zero.offload_disk import require_libaio

pytestmark = list(on_gpu)

STEPS = 8
NAMES = ["zero1_fp16", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_offload_param", "zero3_nvme"]


@pytest.fixture(scope="module")
def reference() -> list[float]:
    with tiny_engine("cuda", "deepspeed=zero0") as (engine, _):
        return train(engine, STEPS)


@pytest.mark.parametrize("name", NAMES)
def test_the_unchanged_json_trains(name: str, reference: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    if name == "zero3_nvme":
        try:
            require_libaio()
        except MachineError as error:
            pytest.skip(str(error))
    folder = tmp_path_factory.mktemp(name)
    with tiny_engine("cuda", f"deepspeed={name}", f"run_dir={folder}") as (engine, _):
        expected = torch.float16 if name == "zero1_fp16" else torch.bfloat16
        assert next(engine.module.parameters()).dtype == expected
        losses = train(engine, STEPS)
    # 16 bits compared with fp32: the first losses differ only by rounding.
    assert losses[0] == pytest.approx(reference[0], rel=5e-3)
    # The first steps in fp16 overflow and are skipped while the loss scale decreases, so its losses only have to fall.
    assert losses[-1] < losses[0] - 0.1
    if name != "zero1_fp16":
        assert losses == pytest.approx(reference, rel=3e-2)


def test_a_hierarchical_partition_size_of_2_is_refused_on_one_gpu() -> None:
    with (
        pytest.raises(ConfigError, match="must divide the number of ranks, 1"),
        tiny_engine("cuda", "deepspeed=zero3_hpz"),
    ):
        pass
