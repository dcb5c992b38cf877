"""`z2all bench ops` on a tiny model."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.command import one_line, z2all
from tests.helpers.training import MICRO_OVERRIDES
from tests.ops.comparing import on_gpu
from z2all_ds.base.accounting import peak_flops
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import Table, to_json
from z2all_ds.bench.op_cases import ModelCases, document_ids
from z2all_ds.bench.ops import OpRow, bench_ops, describe, measure_backend
from z2all_ds.bench.shared import Report
from z2all_ds.ops import Situation
from z2all_ds.ops.gradient_sink import sink_of
from z2all_ds.ops.registry import OP_NAMES, Backend, always, backends_of, choose

CPU = torch.device("cpu")
ON_CPU = Situation("cpu", "fp32", 8)
TOKENS = 2 * 32


def micro_run(*changes: str) -> RunConfig:
    return load_run_config(None, [*MICRO_OVERRIDES, *changes])


def shapes(*changes: str) -> ModelCases:
    return ModelCases(micro_run(*changes), CPU, torch.float32)


@pytest.fixture(scope="module")
def costs() -> Report:
    return bench_ops(micro_run(), CPU)


def test_every_backend_of_every_case_has_a_row(costs: Report) -> None:
    expected = [(op, case.name, name) for op in OP_NAMES for case in shapes().cases(op) for name in backends_of(op)]
    assert [(row.op, row.case, row.backend) for row in costs["rows"] if not row.with_sink] == expected
    cases = {(row.op, row.case) for row in costs["rows"]}
    assert {("attention", "causal"), ("attention", "documents"), ("linear", "qkv"), ("swiglu", "")} <= cases


def test_a_backend_has_figures_if_it_runs_and_a_reason_if_not(costs: Report) -> None:
    for row in costs["rows"]:
        assert row.failed == (backends_of(row.op)[row.backend].why_not(ON_CPU) or "")
        assert row.peak_extra_bytes is None  # torch measures only GPU memory
        if row.failed:
            assert (row.forward_ms, row.backward_ms) == (None, None)
        else:
            assert row.forward_ms > 0 and row.backward_ms >= 0
    running = {(row.op, row.backend) for row in costs["rows"] if not row.failed}
    references = {(op, "eager" if op == "attention" else "torch") for op in OP_NAMES}
    assert running >= references | {("attention", "sdpa"), ("cross_entropy", "chunked")}


def test_one_backend_of_each_op_is_marked_as_chosen_by_auto_and_runs(costs: Report) -> None:
    for op in OP_NAMES:
        taken = {(row.backend, row.failed) for row in costs["rows"] if row.op == op and row.auto}
        assert taken == {(choose(op, "auto", ON_CPU)[0].name, "")}


def test_the_packages_own_backends_are_also_measured_with_a_gradient_sink(costs: Report) -> None:
    with_sink = {(row.op, row.backend) for row in costs["rows"] if row.with_sink}
    expected = {("swiglu", "torch"), ("linear", "torch"), ("cross_entropy", "chunked"), ("cross_entropy", "torch")}
    assert with_sink == expected


@pytest.mark.parametrize(("batch", "length"), [(1, 2), (2, 32), (3, 2048), (1, 5000)])
def test_every_row_consists_of_several_consecutive_documents(batch: int, length: int) -> None:
    ids_BT = document_ids(batch, length)
    assert ids_BT.shape == (batch, length)
    for ids_T in ids_BT:
        documents, lengths = ids_T.unique_consecutive(return_counts=True)
        assert documents.tolist() == list(range(len(documents)))
        assert len(documents) >= 2 and int(lengths.max()) <= 900


def test_attention_in_the_documents_case_stays_within_documents() -> None:
    _, documents = shapes().cases("attention")
    inputs = documents.make_inputs(False)
    visible = inputs.constants[0]
    ids_BT = document_ids(2, 32)
    same_document = ids_BT[:, :, None] == ids_BT[:, None, :]
    assert int(visible.mask().sum()) == int(same_document.tril().sum())
    (by_sdpa,), (by_eager,) = (inputs.forward(backends_of("attention")[name].function) for name in ("sdpa", "eager"))
    torch.testing.assert_close(by_sdpa, by_eager)


@pytest.mark.parametrize(
    ("op", "name"), [("linear", "torch"), ("swiglu", "torch"), ("cross_entropy", "chunked"), ("cross_entropy", "torch")]
)
def test_the_gradient_goes_to_the_sink_and_not_to_autograd(op: str, name: str) -> None:
    inputs = shapes().cases(op)[0].make_inputs(True)
    assert inputs.weight is not None
    sink = sink_of(inputs.weight)
    assert sink is not None and not sink.any()
    inputs.forward_and_backward(backends_of(op)[name].function)
    assert inputs.weight.grad is None
    assert sink.any()
    after_one = sink.clone()
    inputs.forward_and_backward(backends_of(op)[name].function)
    torch.testing.assert_close(sink, 2 * after_one)


def test_an_op_may_overwrite_its_inputs_and_gradients_are_not_accumulated() -> None:
    (case,) = shapes().cases("rms_norm")
    inputs = case.make_inputs(False)
    x, residual = (tensor.clone() for tensor in inputs.activations)
    seen: list[Tensor] = []

    def in_place(x_ND: Tensor, residual_ND: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert x_ND.requires_grad and residual_ND.requires_grad and not x_ND.is_leaf
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
        return x_ND.mul_(2.0) * weight, residual_ND

    inputs.forward_and_backward(in_place)
    assert torch.equal(inputs.activations[0], 2 * x) and torch.equal(inputs.activations[1], residual)
    torch.testing.assert_close(seen[0], (2 * x * inputs.gradients[0]).sum(0))
    assert inputs.weight is not None and inputs.weight.grad is None
    assert all(tensor.grad is None for tensor in inputs.activations)


def test_a_failing_backend_has_a_row_with_the_first_line_of_its_error() -> None:
    def breaks(*arguments: object) -> None:
        raise ArithmeticError("no such instruction\nand much more")

    (case,) = shapes().cases("rope")
    row = measure_backend(case, Backend("rope", "broken", breaks, always), False, ON_CPU, CPU)
    assert row == OpRow("rope", "", "broken", False, False, failed="ArithmeticError: no such instruction")


def test_a_case_that_exceeds_memory_has_a_row_with_the_reason() -> None:
    rows = bench_ops(micro_run("model.vocab_size=2000000000"), CPU, ["cross_entropy"])["rows"]
    running = [row for row in rows if row.backend in ("chunked", "torch")]
    assert running and all("free memory" in row.failed for row in running)


def test_rows_as_json_and_as_a_table(costs: Report) -> None:
    read = json.loads(to_json(costs))
    assert read["rows"][0] == vars(costs["rows"][0])
    assert (read["dtype"], read["micro_batch"], read["sequence_length"]) == ("fp32", 2, 32)
    head, table = describe(costs)
    assert "2 × 32 tokens" in str(head) and torch.__version__ in str(head)
    assert isinstance(table, Table) and [*table.columns[:3]] == ["op", "backend", "forward ms"]
    rows = list(table.rows)
    for row, cells in zip(costs["rows"], rows, strict=True):
        assert (cells[0], cells[-1]) == (f"{row.op} {row.case}".rstrip(), row.failed or "-")
        assert len(cells) == (3 if row.failed else len(table.columns))
    assert any(cells[1] == "torch with sink *" for cells in rows)


def test_the_command_measures_the_given_ops_and_refuses_an_unknown_one(tmp_path: Path) -> None:
    answer = z2all("bench", "ops", "--json", "--op", "rope", "--op", "linear", *MICRO_OVERRIDES, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    read = json.loads(answer.stdout)
    assert {row["op"] for row in read["rows"]} == {"rope", "linear"}
    assert set(read["measured_on"]) >= {"device", "torch"}
    line = one_line(z2all("bench", "ops", "--op", "rotary", cwd=tmp_path), ConfigError.exit_code)
    assert line == f"ConfigError: op 'rotary': no such op. Known: {', '.join(OP_NAMES)}."


@pytest.mark.parametrize("marked", [pytest.param("cuda", marks=on_gpu)])
def test_all_ops_are_measured_on_a_gpu(marked: str) -> None:
    sizes = ("hidden_size=1024", "intermediate_size=2816", "num_attention_heads=16", "vocab_size=65536")
    lengths = ("model.max_position_embeddings=1024", "train.sequence_length=1024", "train.micro_batch=4")
    costs = bench_ops(micro_run(*(f"model.{size}" for size in sizes), *lengths), torch.device(marked, 0))
    assert costs["dtype"] == "bf16" and costs["measured_on"]["device"] == torch.cuda.get_device_name(0)
    for row in costs["rows"]:
        # A library may be missing, but this package's own backends and the choice of `auto` must run.
        assert not row.failed or not (row.auto or row.backend in ("triton", "chunked", "torch")), row
    peak = peak_flops(costs["measured_on"]["device"]) or pytest.skip("no peak known for this GPU")
    # A rate above the peak would mean that a call was not waited for, or not executed.
    (qkv,) = (row for row in costs["rows"] if (row.case, row.backend, row.with_sink) == ("qkv", "torch", False))
    assert 2 * 4 * 1024 * 1024 * (1024 + 2 * 2 * 64) / (qkv.forward_ms / 1e3) < peak
    assert all(row.peak_extra_bytes > 0 for row in costs["rows"] if not row.failed and row.op != "rope")
    extra = {row.backend: row.peak_extra_bytes or 0 for row in costs["rows"] if row.op == "cross_entropy"}
    # All logits in fp32 are 1 GiB; a chunk is 128 MiB.
    assert extra["torch"] > 2**30 and extra["torch"] > 2 * extra["chunked"] > 0
