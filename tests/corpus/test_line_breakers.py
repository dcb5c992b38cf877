import json

from hypothesis import example, given
from hypothesis import strategies as st

from z2all_ds.corpus.line_breakers import escape_line_breakers, has_line_breakers

BREAKERS = "\x85\u2028\u2029"
# Neighbours in UTF-8: characters that share the first or the first two bytes, or carry the last ones.
NEAR = "\x84\x86\u2027\u202a\u2080\ue028\u20a8â¨…“”一㨨𨀀"


@given(st.text(st.sampled_from(BREAKERS + NEAR + "a \n")))
@example("")
@example("\x85")
@example("â")
def test_found_and_escaped(text: str) -> None:
    line = json.dumps(text, ensure_ascii=False).encode()
    assert has_line_breakers(line) == any(char in text for char in BREAKERS)
    escaped = escape_line_breakers(line)
    assert not has_line_breakers(escaped)
    assert json.loads(escaped) == text
    assert len(escaped.decode().splitlines()) == 1


@given(st.binary(max_size=6))
def test_short_and_odd_bytes_are_no_error(data: bytes) -> None:
    assert has_line_breakers(data) == any(char.encode() in data for char in BREAKERS)
