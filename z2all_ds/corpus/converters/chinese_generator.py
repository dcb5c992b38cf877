# ruff: noqa: E501 - a Chinese character counts as two columns, and split sentences are harder to read
"""Generates Chinese documents from tables, templates and arithmetic: any number of bytes, determined by a seed.

The documents are for small runs and tests. Their statements are correct: sums, weekdays, directions and conversions are
computed, facts come from a table. Each document has its own random generator seeded by its number, so the first
documents are the same for any number of bytes.
"""

import datetime
from collections.abc import Callable, Iterator
from random import Random

from z2all_ds.corpus.converters import chinese_tables as tables
from z2all_ds.corpus.converters.chinese_puzzles import number_portrait, ordering_puzzle, reading_numbers, timetable

Text = tuple[str, str]
"""(title, content)"""


def generate_documents(seed: int, wanted_bytes: int) -> Iterator[tuple[str, str, str]]:
    """Yield (category, title, content) until the contents reach `wanted_bytes` in UTF-8."""
    size = number = 0
    while size < wanted_bytes:
        random = Random(f"{seed}/{number}")
        category, write = random.choice(_KINDS)
        title, body = write(random)
        content = f"{title}\n\n{body}\n"
        yield category, title, content
        size += len(content.encode())
        number += 1


def word_problems(random: Random) -> Text:
    """Write three to five small problems, each with its solution and its answer."""
    makers = random.sample((_sharing, _shopping_sum, _meeting, _age, _fence, _pages), random.randint(3, 5))
    parts = [f"第{number}题　{make(random)}" for number, make in zip("一二三四五", makers, strict=False)]
    return random.choice(("算术练习", "应用题几道", "口算之后的应用题", "课后小练习")), "\n\n".join(parts)


def _sharing(random: Random) -> str:
    per, people, rest = random.randint(3, 19), random.randint(3, 12), random.randint(0, 2)
    total, thing = per * people + rest, random.choice(("颗糖", "张贴纸", "个乒乓球", "支粉笔", "粒种子"))
    left = f"，还剩{rest}{thing[0]}" if rest else "，正好分完"
    return (
        f"老师有{total}{thing}，平均分给{people}个同学，每人最多得到多少？还剩多少？\n"
        f"解：{total}除以{people}，商是{per}，余数是{rest}。\n答：每人得到{per}{thing}{left}。"
    )


def _shopping_sum(random: Random) -> str:
    name, (shop, goods) = random.choice(tables.PEOPLE), random.choice(list(tables.GOODS.items()))
    (a, unit_a, low_a, high_a), (b, unit_b, low_b, high_b) = random.sample(goods, 2)
    price_a, price_b = random.randint(low_a, high_a), random.randint(low_b, high_b)
    count_a, count_b = random.randint(2, 6), random.randint(1, 4)
    total = price_a * count_a + price_b * count_b
    return (
        f"{name}在{shop}买了{count_a}{unit_a}{a}和{count_b}{unit_b}{b}。{a}每{unit_a}{price_a}元，{b}每{unit_b}{price_b}元，"
        f"一共要付多少元？\n解：{a}要{price_a}×{count_a}={price_a * count_a}元，{b}要{price_b}×{count_b}={price_b * count_b}元，"
        f"合起来是{price_a * count_a}+{price_b * count_b}={total}元。\n答：一共要付{total}元。"
    )


def _meeting(random: Random) -> str:
    first, second = random.sample(tables.PEOPLE, 2)
    fast, slow, minutes = random.randint(66, 90), random.randint(45, 65), random.randint(4, 25)
    return (
        f"{first}和{second}从一条路的两头同时出发，相向而行。{first}每分钟走{fast}米，{second}每分钟走{slow}米，"
        f"{minutes}分钟后两人相遇。这条路有多长？\n解：两人每分钟一共走{fast}+{slow}={fast + slow}米，"
        f"{minutes}分钟走{fast + slow}×{minutes}={(fast + slow) * minutes}米。\n答：这条路长{(fast + slow) * minutes}米。"
    )


def _age(random: Random) -> str:
    child, later = random.randint(5, 11), random.randint(2, 9)
    times = random.randint(-(-20 // child) + 1, 5)  # the adult is at least twenty years older
    elder, name = child * times, random.choice(tables.PEOPLE)
    return (
        f"{name}今年{child}岁，{random.choice(('妈妈', '爸爸', '舅舅', '姑姑'))}的年龄是{name}的{times}倍。{later}年以后，"
        f"两人相差多少岁？\n解：大人今年{child}×{times}={elder}岁，比{name}大{elder}-{child}={elder - child}岁。"
        f"过几年，两个人都长几岁，相差的岁数不变。\n答：{later}年以后仍然相差{elder - child}岁。"
    )


def _fence(random: Random) -> str:
    gap, gaps = random.choice((2, 3, 4, 5, 6)), random.randint(8, 40)
    return (
        f"一条小路长{gap * gaps}米，在路的一侧每隔{gap}米种一棵树，两头都种，一共要种多少棵？\n"
        f"解：{gap * gaps}÷{gap}={gaps}，说明有{gaps}段。两头都种时，棵数比段数多1，所以是{gaps}+1={gaps + 1}棵。\n"
        f"答：一共要种{gaps + 1}棵。"
    )


def _pages(random: Random) -> str:
    per_day, days, rest = random.randint(12, 35), random.randint(4, 9), random.randint(20, 90)
    return (
        f"一本书有{per_day * days + rest}页，{random.choice(tables.PEOPLE)}每天读{per_day}页，读了{days}天，还剩多少页没有读？\n"
        f"解：已经读了{per_day}×{days}={per_day * days}页，还剩{per_day * days + rest}-{per_day * days}={rest}页。\n"
        f"答：还剩{rest}页。"
    )


def diary(random: Random) -> Text:
    """Write a diary entry with the correct weekday and the weather of the season."""
    day = datetime.date(2001, 1, 1) + datetime.timedelta(days=random.randrange(365 * 30))
    season = "冬春夏秋"[day.month % 12 // 3]
    table = tables.SEASONS[season]
    low, high = tables.LOW_HIGH[season]
    cold = random.randint(low, high - 6)
    warm = cold + random.randint(4, min(10, high - cold))
    signs, doings = random.sample(table["signs"], 2), random.sample(table["doings"], 2)
    weather, friend = random.choice(table["weather"]), random.choice(tables.PEOPLE)
    tomorrow = day + datetime.timedelta(days=1)
    body = (
        f"{day.year}年{day.month}月{day.day}日，{tables.WEEKDAYS[day.weekday()]}，{weather}。\n\n"
        f"{random.choice(('早上', '天刚亮时', '七点多'))}气温只有{cold}度，{random.choice(('中午', '午后'))}升到{warm}度，"
        f"相差{warm - cold}度，{random.choice(('出门要多带一件衣服', '穿什么都不算错', '正是容易着凉的时候'))}。{signs[0]}，{signs[1]}。\n\n"
        f"{random.choice(('上午', '吃过早饭', '收拾完屋子'))}，我{doings[0]}；{random.choice(('下午', '傍晚', '后来'))}{friend}来了，"
        f"我们一起{random.choice(('喝了一壶茶', '下了两盘棋', '听了一会儿广播', '翻看旧照片'))}。{friend}说{random.choice(('日子过得真快', '这样的天气最适合走路', '明年这时候还要再聚'))}。"
        f"{random.choice(('临睡前', '晚上'))}我又{doings[1]}。\n\n"
        f"明天是{tomorrow.month}月{tomorrow.day}日，{tables.WEEKDAYS[tomorrow.weekday()]}，{random.choice(('希望是个好天', '要早点起床', '有一封信要寄', '打算去理发'))}。"
    )
    return f"{season}日一天", body


def shop_dialogue(random: Random) -> Text:
    """Write a dialogue in a shop with a correct bill and change."""
    shop, goods = random.choice(list(tables.GOODS.items()))
    buyer = random.choice(tables.PEOPLE)
    lines = [
        random.choice(
            (f"店主：您好，今天想买点什么？\n{buyer}：我先看看。", f"{buyer}：老板，忙着呢？\n店主：不忙，随便挑。")
        )
    ]
    total = 0
    for thing, unit, low, high in random.sample(goods, random.randint(2, 4)):
        price, count = random.randint(low, high), random.randint(1, 5)
        cost, total = price * count, total + price * count
        ask = random.choice((f"{thing}怎么卖？", f"这{thing}多少钱一{unit}？", f"请问{thing}是什么价钱？"))
        praise = random.choice(("今天刚到的。", "卖得很好。", "您放心挑。", "昨天还要贵一点。", ""))
        lines.append(
            f"{buyer}：{ask}\n店主：一{unit}{price}元。{praise}\n{buyer}：那我要{count}{unit}。\n店主：{count}{unit}是{cost}元。"
        )
    paid = next(note for note in (10, 20, 50, 100, 200, 500, 1000, 2000) if note >= total)
    change = f"收您{paid}元，找您{paid - total}元。" if paid > total else "正好，不用找。"
    lines.append(
        f"{buyer}：一共多少？\n店主：一共{total}元。\n{buyer}：给您{paid}元。\n店主：{change}{random.choice(('慢走。', '欢迎再来。', '路上小心。'))}"
    )
    return f"在{shop}", "\n".join(lines)


def directions(random: Random) -> Text:
    """Write directions between two places; every turn matches the headings before and after it."""
    start, goal = random.sample(tables.PLACES, 2)
    heading, total = random.randrange(4), random.randint(2, 9) * 50
    streets, landmarks = random.sample(tables.STREETS, 4), random.sample(tables.LANDMARKS, 4)
    steps = [
        f"从{start}出来，沿着{streets[0]}一直往{tables.DIRECTIONS[heading]}走，大约{total}米，会看到{landmarks[0]}。"
    ]
    for street, landmark in list(zip(streets, landmarks, strict=True))[1 : random.randint(2, 4)]:
        turn = random.choice((1, 3))
        heading, length = (heading + turn) % 4, random.randint(2, 12) * 50
        total += length
        side = "右" if turn == 1 else "左"
        steps.append(
            f"{random.choice(('在那里', '到了跟前', '过了路口'))}向{side}拐，进入{street}，这时您是朝{tables.DIRECTIONS[heading]}走的，"
            f"再走{length}米，{random.choice(('路边有', '能看见', '会经过'))}{landmark}。"
        )
    minutes = max(1, round(total / 75))
    ending = (
        f"{goal}就在{random.choice(('左', '右'))}手边。全程一共{total}米，按每分钟七十五米的步子，大约要走{minutes}分钟。"
        f"{random.choice(('要是迷了路，随便问一位老人都知道。', '下雨天那里有点滑，请慢一点。', '傍晚人多，最好避开。', '门口不好停车，走路反而方便。'))}"
    )
    asker = random.choice(tables.PEOPLE)
    return f"从{start}到{goal}", f"{asker}：请问去{goal}怎么走？\n\n路人：" + "".join(steps) + ending


def conversion(random: Random) -> Text:
    """Write two unit conversions, in both directions, with a remark."""
    parts = []
    for big, small, factor, remark in random.sample(tables.UNITS, 2):
        there, back = random.randint(2, 30), random.randint(2, 12)
        parts.append(
            f"一{big}等于{factor}{small}。{remark}把{big}换成{small}要乘以{factor}：{there}{big}就是{there}×{factor}={there * factor}{small}。"
            f"反过来，把{small}换成{big}要除以{factor}：{back * factor}{small}等于{back * factor}÷{factor}={back}{big}。"
        )
    tip = random.choice(tables.UNIT_TIPS)
    (first, *_), (second, *_) = random.sample(tables.UNITS, 2)
    parts.append(f"{tip}试一试：先说出{first}和{second}各用来量什么，再各举一个身边的例子。")
    return "单位换算", "\n\n".join(parts)


def entry(random: Random) -> Text:
    """Write a short encyclopedia entry."""
    name, kind, where, features, use, remark = random.choice(tables.ENTRIES)
    shuffled = random.sample(features, len(features))
    looks = f"{name}的特点是{shuffled[0]}，{shuffled[1]}，而且{shuffled[2]}。"
    place = random.choice((f"在{where}可以见到。", f"常见的地方是{where}。", f"要找它，可以去{where}。"))
    useful = random.choice((f"说到用处和习性：{use}。", f"它为人所知，是因为{use}。", f"{use}，这是它最平常的一面。"))
    middle = random.sample((looks, place, useful), 3)
    other = random.choice([e for e in tables.ENTRIES if e[0] != name])
    compare = "两者同属一类，可以对照着看" if other[1] == kind else f"{other[0]}属于{other[1]}，和它并不是一类"
    question = f"{random.choice(tables.PEOPLE)}问：它和{other[0]}有什么不同？回答是，{compare}。"
    ending = random.choice(("值得一提的是，", "另外，", "很多人不知道，"))
    return name, f"{name}，{kind}。{random.choice(tables.OPENINGS)}{''.join(middle)}\n\n{ending}{remark}。{question}"


_KINDS: tuple[tuple[str, Callable[[Random], Text]], ...] = (
    ("arithmetic", word_problems),
    ("diary", diary),
    ("dialogue", shop_dialogue),
    ("directions", directions),
    ("conversion", conversion),
    ("encyclopedia", entry),
    ("numbers", number_portrait),
    ("numbers", reading_numbers),
    ("logic", ordering_puzzle),
    ("timetable", timetable),
)
