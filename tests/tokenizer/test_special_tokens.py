from z2all_ds.tokenizer.special_tokens import ROLES, SPECIAL_TOKENS, padded_vocabulary


def test_special_token_ids_never_change() -> None:
    """Trained models depend on these ids; new tokens may only be appended."""
    text_vocab_size = 64000
    numbers = {token: text_vocab_size + place for place, token in enumerate(SPECIAL_TOKENS)}
    assert numbers == {
        "<|beginoftext|>": 64000,
        "<|endoftext|>": 64001,
        "<|endofprompt|>": 64002,
        "<|im_start|>": 64003,
        "<|im_end|>": 64004,
        "<|UNK|>": 64005,
        "<|PAD|>": 64006,
        "<|CLS|>": 64007,
        "<|SEP|>": 64008,
        "<|MASK|>": 64009,
        "<|BOS|>": 64010,
        "<|EOS|>": 64011,
    }
    assert set(ROLES.values()) <= set(SPECIAL_TOKENS)


def test_the_padded_vocabulary_is_a_multiple_of_64_with_at_least_256_spare_ids() -> None:
    assert padded_vocabulary(64012) == 64320
    for size in range(1, 3000, 7):
        padded = padded_vocabulary(size)
        assert padded % 64 == 0
        assert 256 <= padded - size < 256 + 64
