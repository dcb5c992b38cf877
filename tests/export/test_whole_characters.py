"""Prompts and continuations of byte-level tokens, without parts of characters."""

from z2all_ds.export.whole_characters import whole_prompt, without_cut_end


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def test_a_prompt_ends_with_a_whole_character() -> None:
    tokens = list("ab中文".encode())
    assert [decode(whole_prompt(decode, tokens, most)) for most in (2, 3, 4, 5, 7, 8, 99)] == [
        *("ab", "ab", "ab", "ab中", "ab中", "ab中文", "ab中文")
    ]
    assert whole_prompt(decode, [0x80, 0x81, 0x82], 2) == [0x80, 0x81]  # nothing of it is whole


def test_the_cut_end_of_a_continuation_is_left_out() -> None:
    assert without_cut_end(decode(list("中文".encode())[:5])) == "中"
    assert without_cut_end("中文") == "中文"
