"""Loss curves as real pictures, opened again."""

import html
import json
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib import pyplot
from PIL import Image

from z2all_ds.errors import ConfigError, DataError
from z2all_ds.track.plots import plot_loss

SIZE = (960, 540)  # 8 by 4.5 inches of 120 dots
BLUE = (31, 119, 180)  # matplotlib's first colour: the total


def make_run(folder: Path, domains: tuple[str, ...] = ("code", "english"), steps: int = 20) -> Path:
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        record: dict[str, Any] = {"step": step, "loss": 8.0 / step}
        # not every domain occurs in every step
        record |= {f"loss_of_{name}": 7.0 / step for i, name in enumerate(domains) if (step + i) % 3}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.size == SIZE
        picture.load()
        found = picture.convert("RGB").getcolors(maxcolors=1 << 20)
    assert found
    return {colour for _, colour in found}  # type: ignore[misc]


def texts(path: Path) -> list[str]:
    """The words in an SVG, which matplotlib notes down beside their outlines."""
    comments = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tree = ElementTree.parse(path, comments)
    return [html.unescape(str(node.text)).strip() for node in tree.iter() if node.tag is ElementTree.Comment]


def test_one_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    out = run / "plots" / "loss.png"
    assert plot_loss([run], out) == out
    assert BLUE in colours(out)
    plot_loss([run], tmp_path / "loss.svg")
    found = texts(tmp_path / "loss.svg")
    assert [word for word in found if word in ("all", "code", "english")] == ["all", "code", "english"]
    assert {"step", "loss (nats per token)"} <= set(found)


def test_two_runs_side_by_side_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", domains=("english",))]
    plot_loss(runs, tmp_path / "both.png")
    assert BLUE in colours(tmp_path / "both.png")
    plot_loss(runs, tmp_path / "both.svg")
    names = ["a: all", "a: code", "a: english", "b: all", "b: english"]
    assert [word for word in texts(tmp_path / "both.svg") if word in names] == names


@pytest.mark.parametrize("name", ["中文", "$\\frac$", "a$b$c", "_hidden", "<b>&"])
def test_any_name_of_a_domain_or_a_run_is_drawn(name: str, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, domains=(name,)), make_run(tmp_path / "other")]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # matplotlib's own font has no Chinese
        plot_loss(runs, tmp_path / "loss.svg")
    found = {word.replace("\\$", "$") for word in texts(tmp_path / "loss.svg")}
    assert {"other: all", f"{name}: all", f"{name}: {name}"} <= found


def test_a_name_that_begins_with_an_underscore_is_in_the_legend(tmp_path: Path) -> None:
    plot_loss([make_run(tmp_path / "run", domains=("_own",))], tmp_path / "loss.svg")
    assert "_own" in texts(tmp_path / "loss.svg")


def test_a_run_of_a_single_step(tmp_path: Path) -> None:
    plot_loss([make_run(tmp_path / "run", steps=1)], tmp_path / "loss.png")
    assert len(colours(tmp_path / "loss.png")) > 10


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "lo'])
def test_a_folder_without_a_step_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"no metrics\.jsonl with a step in it") as caught:
        plot_loss([tmp_path], tmp_path / "loss.png")
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("name", ["loss", "loss.xyz", "png"])
def test_only_pictures_that_are_promised(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        plot_loss([run], tmp_path / name)
    assert list(tmp_path.iterdir()) == [run]


def test_no_figure_stays_open(tmp_path: Path) -> None:
    plot_loss([make_run(tmp_path / "run")], tmp_path / "loss.png")
    with pytest.raises(DataError):
        plot_loss([tmp_path / "run", tmp_path / "missing"], tmp_path / "loss.png")
    assert pyplot.get_fignums() == []
