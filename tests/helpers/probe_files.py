"""A small file with probes of every kind, whose texts fit into the short samples of tests."""

from pathlib import Path

PROBES = """
- {name: 首都, prompt: 中国的首都是, completion: [北京, 上海], at_least: 0.5}
- {name: sum/of$odd, prompt: "1 + 1 =", completion: " 2", at_most: 1}
- {name: plain, text: The house is old., at_most: 1.0e+6, from_step: 8}
- {name: order, better: 他来了, worse: 了他来, per: sum}
- {name: bytes, prompt: "She ", better: goes home, worse: home goes so, per: byte, at_most: 100}
- {name: json, prompt: 以json输出, starts_with: ["{", "{}", "["], matches: '[\\s\\S]*', new_tokens: 4}
- {name: silent, prompt: ab, starts_with: c}
"""


def write_probes(folder: Path, content: str = PROBES) -> Path:
    path = folder / "small.yaml"
    path.write_text(content, encoding="utf-8")
    return path
