# ruff: noqa: E501 - a Chinese character counts as two columns, and split sentences are harder to read
"""Chinese documents about numbers, order and time; every answer is computed."""

from itertools import pairwise
from random import Random

from z2all_ds.corpus.converters.chinese_tables import PEOPLE, PLACES

_DIGITS = "零一二三四五六七八九"


def read_number(number: int) -> str:
    """Return a number below one hundred million in words: 30005 -> 三万零五, 14 -> 十四."""
    assert 0 <= number < 100_000_000
    if number == 0:
        return "零"
    high, low = divmod(number, 10_000)
    text = _read_four(high) + "万" if high else ""
    if low:
        text += ("零" if high and low < 1000 else "") + _read_four(low)
    return text[1:] if text.startswith("一十") else text


def _read_four(number: int) -> str:
    text, gap = "", False
    for unit, size in (("千", 1000), ("百", 100), ("十", 10), ("", 1)):
        digit = number // size % 10
        if digit:
            text += ("零" if gap and text else "") + _DIGITS[digit] + unit
        gap = digit == 0
    return text


def number_portrait(random: Random) -> tuple[str, str]:
    """Write about factors, parity, digits and neighbours of a number."""
    number = random.randint(11, 400)
    factors = [f for f in range(1, number + 1) if number % f == 0]
    sentences = [f"{number}读作{read_number(number)}，是一个{'偶' if number % 2 == 0 else '奇'}数。"]
    if len(factors) == 2:
        sentences.append(f"它只有1和{number}两个因数，所以它是质数。")
    else:
        listed = "、".join(map(str, factors))
        sentences.append(
            f"它的因数有{listed}，一共{len(factors)}个，所以它是合数。分解质因数得到{number}={_prime_product(number)}。"
        )
    digits = sum(map(int, str(number)))
    three = "能" if digits % 3 == 0 else "不能"
    sentences.append(f"它的各位数字之和是{digits}，{digits}{three}被3整除，因此{number}也{three}被3整除。")
    sentences.append(
        f"它的前一个数是{number - 1}，后一个数是{number + 1}，这三个相邻的数加起来是{3 * number}，正好是它的三倍。"
    )
    root = int(number**0.5)
    if root * root == number:
        sentences.append(f"它还是一个平方数，因为{root}×{root}={number}。")
    else:
        sentences.append(f"它夹在两个平方数之间：{root}的平方是{root**2}，{root + 1}的平方是{(root + 1) ** 2}。")
    sentences.append(f"写成二进制，它是{number:b}，一共{number.bit_length()}位。")
    head, *rest = sentences
    return f"数的档案：{number}", head + "".join(random.sample(rest, random.randint(3, len(rest))))


def _prime_product(number: int) -> str:
    primes, factor = [], 2
    while number > 1:
        while number % factor == 0:
            primes.append(str(factor))
            number //= factor
        factor += 1
    return "×".join(primes)


def reading_numbers(random: Random) -> tuple[str, str]:
    """Write numbers in words, sort them, and give a difference."""
    numbers = sorted(random.sample(range(100, 10_000), 2) + random.sample(range(10_000, 9_000_000), 2))
    lines = [f"{number}读作{read_number(number)}。" for number in random.sample(numbers, 4)]
    gap = numbers[1] - numbers[0]
    small = random.choice(("从小到大排列", "按大小排好队"))
    return "大数的读法", (
        f"{''.join(lines)}\n\n{small}，依次是{'、'.join(map(str, numbers))}。最小的两个相差{gap}，也就是{read_number(gap)}。"
        f"{random.choice(('中间有零的时候，连续几个零只读一个。', '末尾的零都不读出来。', '四位一级，先读万级，再读个级。'))}"
    )


def ordering_puzzle(random: Random) -> tuple[str, str]:
    """Write a puzzle (who is tallest, fastest, oldest): clues in random order, the solution, and the only answer."""
    names = random.sample(PEOPLE, random.randint(3, 5))
    more, less, question = random.choice(
        (("高", "矮", "谁最高"), ("大", "小", "谁的年纪最大"), ("快", "慢", "谁跑得最快"), ("重", "轻", "谁的书包最重"))
    )
    clues = [random.choice((f"{one}比{other}{more}", f"{other}比{one}{less}")) for one, other in pairwise(names)]
    clues = random.sample(clues, len(clues))
    middle = f"，{names[1]}{'排第二' if len(names) > 3 else '在中间'}"
    return random.choice(("排一排", "谁在前面", "动脑筋")), (
        f"已知：{'；'.join(clues)}。请问{question}？\n\n"
        f"想法：把每句话都改成“甲比乙{more}”的样子，再首尾相接，就得到一条链：{'＞'.join(names)}。"
        f"链的第一个是{names[0]}，最后一个是{names[-1]}{middle}。\n\n答案：{names[0]}。"
        f"{random.choice(('只有相邻的两个人才需要直接比较，其余的可以推出来。', '如果少了其中任何一句话，答案就不一定唯一了。', '画一条线，把名字依次写上去，会更清楚。'))}"
    )


def timetable(random: Random) -> tuple[str, str]:
    """Write a trip whose departures and arrivals match its durations."""
    stops = random.sample(PLACES, random.randint(3, 4))
    name, clock = random.choice(PEOPLE), random.randint(6 * 60, 10 * 60)
    started, parts = clock, [f"{name}{_clock(clock)}从{stops[0]}出发"]
    for stop in stops[1:]:
        ride, stay = random.randint(8, 55), random.randint(10, 60)
        parts.append(f"路上用了{ride}分钟，{_clock(clock + ride)}到达{stop}")
        clock += ride
        if stop != stops[-1]:
            parts.append(f"在那里停留了{stay}分钟，{_clock(clock + stay)}离开")
            clock += stay
    hours, minutes = divmod(clock - started, 60)
    lasted = (f"{hours}小时" if hours else "") + (f"{minutes}分钟" if minutes else "")
    return "一天的行程", (
        "；".join(parts) + f"。\n\n从出发到最后到达，一共经过了{lasted}，合{clock - started}分钟。"
        f"{random.choice(('算时间要记得六十分钟进一小时。', '先算整小时，再算剩下的分钟，不容易出错。', '如果跨过中午，用二十四小时制更方便。'))}"
    )


def _clock(minutes: int) -> str:
    hour, minute = divmod(minutes, 60)
    return f"{hour}点整" if minute == 0 else f"{hour}点{minute:02d}分"
