"""Loss per domain, compared with a plain loop, across document boundaries, micro-batches and ranks."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from z2all_ds.base.world import World
from z2all_ds.ops.cross_entropy import IGNORED_LABEL
from z2all_ds.ops.cross_entropy import reference as cross_entropy
from z2all_ds.train.meters.channel_loss import ChannelLoss, RankCost, perplexities

DOMAINS = ["code", "en", "never", "zh"]
CPU = torch.device("cpu")
MicroBatch = tuple[Tensor, Tensor, Tensor]


def micro_batch(seed: int, batch: int = 2, tokens: int = 9) -> MicroBatch:
    """Return losses, labels and domains of packed rows. Each row has two documents, whose last tokens have no label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 7, (batch, tokens), generator=generator)
    domains = torch.empty(batch, tokens, dtype=torch.long)
    for row in range(batch):
        cut = int(torch.randint(1, tokens, (1,), generator=generator))
        first, second = torch.randint(0, 3, (2,), generator=generator).tolist()
        names = [0, 1, 3]  # domain 2 never occurs
        domains[row, :cut], domains[row, cut:] = names[first], names[second]
        labels[row, cut - 1] = labels[row, -1] = IGNORED_LABEL
    # The head is the identity, so the random hidden states are the logits.
    _, losses = cross_entropy(torch.randn(batch * tokens, 7, generator=generator), torch.eye(7), labels.flatten())
    return losses.view(labels.shape), labels, domains


def plain_loop(batches: list[MicroBatch]) -> tuple[float, dict[str, float]]:
    """Return the total mean and the means per domain, from exact sums of the same fp32 values."""
    terms: dict[str, list[float]] = {}
    for losses, labels, domains in batches:
        for loss, label, domain in zip(*(x.flatten().tolist() for x in (losses, labels, domains)), strict=True):
            if label != IGNORED_LABEL:
                terms.setdefault(DOMAINS[domain], []).append(loss)
    every = [term for part in terms.values() for term in part]
    return math.fsum(every) / len(every), {name: math.fsum(part) / len(part) for name, part in terms.items()}


def assert_same(found: tuple[float, dict[str, float]], wanted: tuple[float, dict[str, float]]) -> None:
    """Compare with a tolerance of 1e-13, which only allows fp64 sums of a few dozen terms in another order."""
    assert found[0] == pytest.approx(wanted[0], rel=1e-13)
    assert found[1] == pytest.approx(wanted[1], rel=1e-13)


@given(seeds=st.lists(st.integers(0, 10_000), min_size=1, max_size=5))
@settings(deadline=None)
def test_losses_match_a_plain_loop(seeds: list[int]) -> None:
    meter = ChannelLoss(DOMAINS, CPU)
    batches = [micro_batch(seed) for seed in seeds]
    for batch in batches:
        meter.add(*batch)
    found = meter.take()
    assert_same(found, plain_loop(batches))
    assert "never" not in found[1]


def test_ignored_labels_are_not_counted() -> None:
    meter = ChannelLoss(DOMAINS, CPU)
    labels = torch.tensor([[1, IGNORED_LABEL, 2, IGNORED_LABEL]])
    losses = torch.tensor([[1.0, 0.0, 4.0, 0.0]])
    meter.add(losses, labels, torch.tensor([[0, 0, 3, 1]]))
    assert meter.take() == (2.5, {"code": 1.0, "zh": 4.0})  # en has a position, but its label is ignored


def test_take_resets_the_meter() -> None:
    meter = ChannelLoss(DOMAINS, CPU)
    meter.add(*micro_batch(1))
    first = meter.take()
    assert meter.take() == (0.0, {})
    meter.add(*micro_batch(1))
    assert meter.take() == first


def test_the_meter_keeps_no_autograd_graph() -> None:
    meter = ChannelLoss(DOMAINS, CPU)
    losses, labels, domains = micro_batch(1)
    meter.add(losses.requires_grad_() * 2, labels, domains)
    assert not meter._totals.requires_grad


def test_a_million_tokens_cause_no_rounding_error() -> None:
    """A sum of 0.1 in fp32 would be off by 1e-3 or more after a million terms."""
    meter = ChannelLoss(["only"], CPU)
    losses = torch.full((1, 1_000_000), 0.1)
    meter.add(losses, torch.zeros_like(losses, dtype=torch.long), torch.zeros_like(losses, dtype=torch.long))
    assert meter.take()[0] == pytest.approx(losses[0, 0].item(), rel=1e-12)


def test_nan_appears_only_in_its_domain_and_the_total() -> None:
    meter = ChannelLoss(DOMAINS, CPU)
    labels = torch.tensor([[1, 2]])
    meter.add(torch.tensor([[float("nan"), 3.0]]), labels, torch.tensor([[0, 1]]))
    mean, per_domain = meter.take()
    assert math.isnan(mean)
    assert math.isnan(per_domain["code"])
    assert per_domain["en"] == 3.0


def _one_rank(rank: int, world_size: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    meter = ChannelLoss(DOMAINS, CPU, World(rank, world_size, rank, world_size))
    answers = []
    for first_seed in (0, 100):  # two steps: values of the first must not appear in the second
        for seed in range(first_seed + rank, first_seed + 6, world_size):
            meter.add(*micro_batch(seed))
        answers.append([*meter.take(), meter.rank_costs])
        meter.say_cost(RankCost(rank + 0.5, rank + 0.25, 10.0**11 + rank))
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(answers), encoding="utf-8")
    torch.distributed.destroy_process_group()


@pytest.mark.processes
def test_two_ranks_give_the_values_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_one_rank, args=(2, str(tmp_path)), nprocs=2)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert ranks[0] == ranks[1]
    for step, first_seed in enumerate((0, 100)):
        mean, per_domain, costs = ranks[0][step]
        assert costs == ([[0, 0, 0]] * 2, [[0.5, 0.25, 1e11], [1.5, 1.25, 1e11 + 1]])[step]
        assert_same((mean, per_domain), plain_loop([micro_batch(seed) for seed in range(first_seed, first_seed + 6)]))


def test_a_raised_flag_is_seen_by_one_take_only() -> None:
    meter = ChannelLoss(DOMAINS, CPU)
    meter.add(*micro_batch(1))
    wanted = meter.take()
    assert meter.flag_was_raised is False
    meter.add(*micro_batch(1))
    meter.raise_flag()
    assert meter.take() == wanted and meter.flag_was_raised is True
    meter.take()
    assert meter.flag_was_raised is False


def test_perplexities_have_the_names_of_the_losses() -> None:
    found = perplexities("validation_", 2.0, {"zh": 1e9, "en": math.nan})
    assert found == {"validation_perplexity": math.exp(2.0), "validation_perplexity_of_zh": math.exp(700.0)}


def test_tokens_of_the_last_step_are_counted_by_domain() -> None:
    meter = ChannelLoss(DOMAINS, CPU)
    labels = torch.tensor([[1, IGNORED_LABEL, 3, 4]])
    meter.add(torch.ones(1, 4), labels, torch.tensor([[0, 0, 2, 2]]))
    meter.take()
    assert meter.tokens == {DOMAINS[0]: 1, DOMAINS[2]: 2}
    meter.take()
    assert meter.tokens == {}


def test_skipped_records_are_counted_by_domain_without_changing_the_loss() -> None:
    plain, meter = ChannelLoss(DOMAINS, CPU, World()), ChannelLoss(DOMAINS, CPU, World(), counts_bad_records=True)
    for one in (plain, meter):
        one.add(*micro_batch(1))
        one.raise_flag()
        one.say_cost(RankCost(0.5, 0.25, 3.0))
    meter.add_bad_records({"zh": 2, "code": 1})
    meter.add_bad_records({"zh": 1})
    assert meter.take() == plain.take()
    assert (meter.bad_records, plain.bad_records) == ({"code": 1, "zh": 3}, {})
    assert meter.flag_was_raised and meter.tokens == plain.tokens
    assert meter.rank_costs == plain.rank_costs == [RankCost(0.5, 0.25, 3.0)]
    meter.take()
    assert meter.bad_records == {}


def test_without_a_world_no_costs_are_exchanged() -> None:
    meter = ChannelLoss(DOMAINS, CPU)
    meter.take()
    assert meter.rank_costs == []
