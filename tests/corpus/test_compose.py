import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.compose import check_template, composed
from z2all_ds.corpus.draft import Draft


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{content}", "答{title}"),
        ("{title}\n{content}", "问\n答{title}"),
        ("{title}\n{desc}\n{content}", "问\n答{title}"),  # nothing in desc: no empty line
        ("问：{title}（{desc}）\n\n答：{content}", "问：问（）\n\n答：答{title}"),
        ("{category}: {title} {content}!", "类: 问 答{title}!"),
    ],
)
def test_composed(template: str, content: str) -> None:
    """What stands in a field is never read as a template."""
    check_template(template)
    assert composed(Draft("问", "答{title}", "类"), template) == content


@pytest.mark.parametrize(
    ("template", "words"), [("{titel} {content}", "no field 'titel'"), ("{title}", "must contain"), ("{}", "no field")]
)
def test_templates_that_cannot_be_meant(template: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_template(template)
