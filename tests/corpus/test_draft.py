import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.draft import Draft, check_template, compose


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{content}", "答{title}"),
        ("{title}\n{content}", "问\n答{title}"),
        ("{title}\n{desc}\n{content}", "问\n答{title}"),  # an empty desc leaves no empty line
        ("问：{title}（{desc}）\n\n答：{content}", "问：问（）\n\n答：答{title}"),
        ("{category}: {title} {content}!", "类: 问 答{title}!"),
    ],
)
def test_templates_are_filled_with_the_fields_of_a_draft(template: str, content: str) -> None:
    """Placeholders in the value of a field are not replaced."""
    check_template(template)
    assert compose(Draft("问", "答{title}", "类"), template) == content


@pytest.mark.parametrize(
    ("template", "words"), [("{titel} {content}", "no field 'titel'"), ("{title}", "must contain"), ("{}", "no field")]
)
def test_invalid_templates_are_refused(template: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_template(template)
