from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.corpus import load_manifest, parse_record
from z2all_ds.tokenizer.sampling import sample_texts, share_budget


def test_small_domains_leave_their_share_to_the_large() -> None:
    assert share_budget({"a": 1000, "b": 1000, "c": 1000}, 300) == {"a": 100, "b": 100, "c": 100}
    assert share_budget({"a": 1000, "b": 10, "c": 1000}, 300) == {"a": 145, "b": 10, "c": 145}
    assert share_budget({"a": 5, "b": 7}, 300) == {"a": 5, "b": 7}


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 10**6), min_size=1, max_size=6), st.integers(0, 10**6))
def test_shares_use_the_budget_and_no_more(available: dict[str, int], budget: int) -> None:
    shares = share_budget(available, budget)
    assert shares.keys() == available.keys()
    assert all(shares[name] <= available[name] for name in available)
    assert min(budget, sum(available.values())) - len(available) < sum(shares.values()) <= budget


def test_a_sample_is_spread_over_all_shards(small_corpus: Path) -> None:
    manifest = load_manifest(small_corpus)
    everything = [
        parse_record(line, "x").content
        for shard in manifest.shards
        if shard.domain == "zh"
        for line in (small_corpus / shard.path).read_bytes().splitlines(keepends=True)
    ]
    size = manifest.domains["zh"][1]
    assert list(sample_texts(small_corpus, manifest, "zh", size)) == everything
    third = list(sample_texts(small_corpus, manifest, "zh", size // 3))
    places = [everything.index(text) for text in third]
    assert places == sorted(places)
    assert 0.25 * len(everything) < len(third) < 0.4 * len(everything)
    assert places[0] < 3
    assert places[-1] > len(everything) - 12
    assert len(list(sample_texts(small_corpus, manifest, "zh", 1))) == 1
