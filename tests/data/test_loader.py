"""Batches: their shape, the thread behind them, and a state that knows only what was consumed."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.data.corpus_maker import as_arrays, assert_same, open_stream, small_corpus
from tests.data.test_prefetch import prefetch_threads, wait_until
from z2all_ds.data import BatchLoader
from z2all_ds.data.packing import SAMPLE_COLUMNS
from z2all_ds.errors import ConfigError, DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return small_corpus(tmp_path)


def test_batches_are_the_samples_in_order(corpus: Path) -> None:
    samples = iter(open_stream(corpus))
    with BatchLoader(open_stream(corpus), micro_batch_size=5) as loader:
        for _, batch in zip(range(8), loader, strict=False):
            assert tuple(batch) == SAMPLE_COLUMNS
            assert all(column.shape == (5, 16) and column.dtype == torch.int64 for column in batch.values())
            for row in range(5):
                assert_same({name: column[row] for name, column in batch.items()}, as_arrays(next(samples)))


def test_state_is_of_the_last_batch_consumed(corpus: Path) -> None:
    """The thread is known to be ahead, and the state equals that of a stream that never worked ahead."""
    plain = open_stream(corpus)
    samples = iter(plain)
    with BatchLoader(open_stream(corpus), micro_batch_size=5, prefetch_batches=3) as loader:
        assert loader.state_dict() == plain.state_dict()
        for _ in range(4):
            next(loader)
            wait_until(lambda: loader._prefetcher._queue.full())
            for _ in range(5):
                next(samples)
            assert loader.state_dict() == plain.state_dict()
            assert loader.state_dict()["samples_consumed_global"] == plain.state_dict()["samples_consumed_global"] > 0


def test_state_given_out_does_not_move(corpus: Path) -> None:
    with BatchLoader(open_stream(corpus), micro_batch_size=12) as loader:
        next(loader)
        state = loader.state_dict()
        expected = next(loader)
        for _ in range(3):
            next(loader)
        loader.load_state_dict(state)
        assert_same(next(loader), expected)


def test_closing_leaves_no_thread_and_loses_no_batch(corpus: Path) -> None:
    with BatchLoader(open_stream(corpus), micro_batch_size=3) as other:
        expected = [next(other) for _ in range(6)]
    loader = BatchLoader(open_stream(corpus), micro_batch_size=3)
    assert not prefetch_threads()
    for batch in expected:
        assert_same(next(loader), batch)
        assert len(prefetch_threads()) == 1
        loader.close()
        assert not prefetch_threads()


def test_broken_shard_is_raised_in_the_consumer(corpus: Path) -> None:
    (corpus / "web-00010.jsonl").unlink()
    with BatchLoader(open_stream(corpus), micro_batch_size=4) as loader:
        with pytest.raises(DataError, match=r"web-00010\.jsonl, record"):
            list(itertools.islice(loader, 1000))
        with pytest.raises(DataError):
            next(loader)
    assert not prefetch_threads()


def test_pinning_without_a_gpu_says_so(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with BatchLoader(open_stream(corpus), micro_batch_size=2, pin_memory=True) as loader:
        assert not next(loader)["input_ids"].is_pinned()
    assert "pin_memory" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")
def test_pinned_batches(corpus: Path) -> None:
    with BatchLoader(open_stream(corpus), micro_batch_size=2, pin_memory=True) as loader:
        assert all(column.is_pinned() for column in next(loader).values())


@pytest.mark.parametrize("settings", [{"micro_batch_size": 0}, {"micro_batch_size": 1, "prefetch_batches": 0}])
def test_sizes_refused(corpus: Path, settings: dict) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BatchLoader(open_stream(corpus), **settings)
