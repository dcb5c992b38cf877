import datetime
import re
from collections import Counter

import pytest

from z2all_ds.corpus.converters.chinese_generator import generate_documents
from z2all_ds.corpus.converters.chinese_puzzles import read_number

DOCUMENTS = list(generate_documents(3, 400_000))
ALL_TEXT = "\n".join(content for _, _, content in DOCUMENTS)


def test_the_same_seed_gives_the_same_text_and_a_larger_size_only_adds_documents() -> None:
    assert list(generate_documents(3, 50_000)) == DOCUMENTS[: len(list(generate_documents(3, 50_000)))]
    assert list(generate_documents(4, 5_000)) != list(generate_documents(3, 5_000))
    assert list(generate_documents(3, 0)) == []


def test_all_nine_categories_appear_and_few_documents_repeat() -> None:
    assert len(Counter(category for category, _, _ in DOCUMENTS)) == 9
    assert len({content for _, _, content in DOCUMENTS}) > 0.98 * len(DOCUMENTS)
    assert "{" not in ALL_TEXT
    assert "。。" not in ALL_TEXT


def test_every_equation_is_correct() -> None:
    operations = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__, "÷": int.__floordiv__}
    found = re.findall(r"(?<![\d×])(\d+)([-+×÷])(\d+)=(\d+)(?![\d×])", ALL_TEXT)
    assert len(found) > 500
    for left, sign, right, result in found:
        assert operations[sign](int(left), int(right)) == int(result)


def test_prime_factorizations_are_correct() -> None:
    found = re.findall(r"得到(\d+)=([\d×]+)", ALL_TEXT)
    assert len(found) > 20
    for number, product in found:
        value = 1
        for prime in product.split("×"):
            value *= int(prime)
        assert value == int(number)


def test_weekdays_match_their_dates() -> None:
    found = re.findall(r"(\d+)年(\d+)月(\d+)日，星期(.)", ALL_TEXT)
    assert len(found) > 50
    for year, month, day, weekday in found:
        assert "一二三四五六日"[datetime.date(int(year), int(month), int(day)).weekday()] == weekday


def test_shop_bills_add_up() -> None:
    bills = [content for category, _, content in DOCUMENTS if category == "dialogue"]
    assert bills
    for bill in bills:
        total = sum(map(int, re.findall(r"店主：\d+[^元]是(\d+)元", bill)))
        assert f"一共{total}元。" in bill
        change = re.search(r"收您(\d+)元，找您(\d+)元", bill)
        assert change is None or int(change[1]) - int(change[2]) == total


def test_turns_match_the_stated_directions() -> None:
    compass = "东南西北"
    for category, _, content in DOCUMENTS:
        if category == "directions":
            heading = compass.index(re.search(r"一直往(.)走", content)[1])
            for side, now in re.findall(r"向(左|右)拐，进入[^，]+，这时您是朝(.)走的", content):
                heading = (heading + (1 if side == "右" else -1)) % 4
                assert compass[heading] == now


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "零"), (10, "十"), (14, "十四"), (110, "一百一十"), (1001, "一千零一"), (10010, "一万零一十"),
     (100000, "十万"), (120034, "十二万零三十四"), (3050000, "三百零五万"), (20300405, "二千零三十万零四百零五")],
)  # fmt: skip
def test_numbers_are_written_correctly_in_chinese(number: int, words: str) -> None:
    assert read_number(number) == words
