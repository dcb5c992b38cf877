"""Plots written as real image files and read back."""

import html
import json
import math
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.axes._secondary_axes import SecondaryAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.track.fonts import fonts_for
from z2all_ds.track.plot_data import Panel, read_run
from z2all_ds.track.plot_kinds import PlotOptions, chosen_kinds
from z2all_ds.track.plots import _figure, plot, plot_loss

SIZE = (960, 540)  # 8 by 4.5 inches at 120 dots per inch
BLUE = (31, 119, 180)  # matplotlib's first colour, used for the total loss


def make_run(folder: Path, domains: tuple[str, ...] = ("code", "english"), steps: int = 20) -> Path:
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        record: dict[str, Any] = {"step": step, "loss": 8.0 / step}
        # Not every domain occurs in every step.
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
    """Return the texts in an SVG, which matplotlib writes as comments next to their outlines."""
    comments = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tree = ElementTree.parse(path, comments)
    return [html.unescape(str(node.text)).strip() for node in tree.iter() if node.tag is ElementTree.Comment]


def test_the_loss_of_one_run_is_plotted_per_domain(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    out = run / "plots" / "loss.png"
    assert plot_loss([run], out) == out
    assert BLUE in colours(out)
    plot_loss([run], tmp_path / "loss.svg")
    found = texts(tmp_path / "loss.svg")
    assert [word for word in found if word in ("all", "code", "english")] == ["all", "code", "english"]
    assert {"step", "loss (nats per token)"} <= set(found)


def test_two_runs_in_one_plot_are_labelled_by_run_and_domain(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", domains=("english",))]
    plot_loss(runs, tmp_path / "both.png")
    assert BLUE in colours(tmp_path / "both.png")
    plot_loss(runs, tmp_path / "both.svg")
    names = ["a: all", "a: code", "a: english", "b: all", "b: english"]
    assert [word for word in texts(tmp_path / "both.svg") if word in names] == names


@pytest.mark.parametrize("name", ["中文", "$\\frac$", "a$b$c", "_hidden", "<b>&"])
def test_any_name_of_a_domain_or_a_run_is_drawn(name: str, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, domains=(name,)), make_run(tmp_path / "other")]
    if fonts_for([name]).unknown:
        pytest.skip("no font with Chinese characters on this machine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # for example "Glyph missing"
        plot_loss(runs, tmp_path / "loss.svg")
    found = {word.replace("\\$", "$") for word in texts(tmp_path / "loss.svg")}
    assert {"other: all", f"{name}: all", f"{name}: {name}"} <= found


def test_a_name_that_begins_with_an_underscore_is_in_the_legend(tmp_path: Path) -> None:
    plot_loss([make_run(tmp_path / "run", domains=("_own",))], tmp_path / "loss.svg")
    assert "_own" in texts(tmp_path / "loss.svg")


def test_a_run_with_a_single_step_is_plotted(tmp_path: Path) -> None:
    plot_loss([make_run(tmp_path / "run", steps=1)], tmp_path / "loss.png")
    assert len(colours(tmp_path / "loss.png")) > 10


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "lo'])
def test_a_folder_without_a_complete_record_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"no metrics\.jsonl with a step in it") as caught:
        plot_loss([tmp_path], tmp_path / "loss.png")
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("name", ["loss", "loss.xyz", "png"])
def test_an_unknown_file_ending_is_refused(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        plot_loss([run], tmp_path / name)
    assert list(tmp_path.iterdir()) == [run]


def test_no_figure_stays_open(tmp_path: Path) -> None:
    plot_loss([make_run(tmp_path / "run")], tmp_path / "loss.png")
    with pytest.raises(DataError):
        plot_loss([tmp_path / "run", tmp_path / "missing"], tmp_path / "loss.png")
    assert pyplot.get_fignums() == []


RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a real GPU run that was stopped and resumed, with the additional fields of newer runs."""
    folder = tmp_path_factory.mktemp("runs") / "real"
    folder.mkdir()
    records = (RESULTS / "2026-11-16_h200_stopped_training_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for record in map(json.loads, records):
            record |= {"tokens_of_code": 100, "tokens_of_zh": 300 if record["step"] % 2 else 100}
            if record["step"] % 100 == 0:
                record["probe_首都"] = record["step"] / 1000
            file.write(json.dumps(record) + "\n")
    events = (RESULTS / "2026-11-16_h200_stopped_training_events.jsonl").read_text(encoding="utf-8").splitlines()
    mixture = [{"name": "first", "first_step": 0, "shares": {"code": 0.25, "zh": 0.75}}]
    with (folder / "events.jsonl").open("w", encoding="utf-8") as file:
        for event in map(json.loads, events):
            file.write(json.dumps(event | ({"mixture": mixture} if event["event"] == "started" else {})) + "\n")
    return folder


def test_all_kinds_of_curves_are_plotted_in_one_file(real_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.svg"
    assert plot([real_run], out, PlotOptions("all", smooth=0.9, title="a title")) == [out]
    found = set(texts(out))
    assert {"a title", "loss (nats per token)", "validation loss (nats per token)", "perplexity"} <= found
    assert {"learning rate", "gradient norm", "tokens per second", "utilisation (%)", "seconds per step"} <= found
    assert {"memory (GiB)", "share of tokens (%)", "probe", "requested", "restart", "checkpoint"} <= found


def test_probes_have_a_panel_per_kind_and_long_legends_are_shortened(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    kinds = {"completion": "probability", "sentence": "perplexity per token", "compare": "margin (nats)"}
    probes = [{"name": f"{kind}_{number}", "kind": kind} for kind in kinds for number in range(20)]
    values = {f"probe_{probe['name']}": 0.5 for probe in probes} | {"probe_unknown": 3.0}
    records = [{"step": step, "loss": 2.0, **values} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "events.jsonl").write_text(json.dumps({"event": "started", "step": 0, "probes": probes}) + "\n")
    plot([run], tmp_path / "probes.svg", PlotOptions("probes"))
    found = texts(tmp_path / "probes.svg")
    assert {*kinds.values(), "probe", "unknown"} <= set(found)
    assert found.count("and 8 more") == 3
    assert {"completion_0", "sentence_9"} & set(found) == {"completion_0"}


def test_a_folder_gets_one_file_per_kind(real_run: Path, tmp_path: Path) -> None:
    files = plot([real_run], tmp_path / "new", PlotOptions("loss, lr,probes", file_format="svg"), is_folder=True)
    assert files == [tmp_path / "new" / f"{kind}.svg" for kind in ("loss", "lr", "probes")]
    assert all("step" in texts(file) for file in files)


@pytest.mark.parametrize(("x", "label"), [("step", "step"), ("tokens", "millions of tokens"), ("time", "minutes")])
def test_the_x_axis_can_be_steps_tokens_or_time(real_run: Path, tmp_path: Path, x: str, label: str) -> None:
    plot([real_run], tmp_path / "loss.svg", PlotOptions(x=x, log=True))
    found = texts(tmp_path / "loss.svg")
    assert label in found
    assert {"2", "3", "5", "10"} <= set(found)  # labels of the logarithmic axis


def drawn_axes(run: Path, what: str, **options: Any) -> list[Axes]:
    """Return the axes of a plot after it was drawn."""
    found = read_run(run, "run", chosen_kinds(what), options.get("x", "step"), 0.0)
    panels = [Panel(kind, [found]) for kind in chosen_kinds(what)]
    figure = _figure(panels, PlotOptions(what, **options), fonts_for([]))
    FigureCanvasAgg(figure).draw()
    return list(figure.axes)


@pytest.mark.parametrize("losses", [(3.3, 2.2), (9.0, 0.02)])
@pytest.mark.parametrize("log", [False, True])
def test_the_right_axis_of_validation_shows_perplexities(tmp_path: Path, losses: tuple[float, ...], log: bool) -> None:
    records = [{"step": step, "validation_loss": loss} for step, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (axes,) = drawn_axes(tmp_path, "validation", log=log)
    (right,) = axes.child_axes
    assert isinstance(right, SecondaryAxis)
    ticks = [*right.yaxis.get_major_ticks(), *right.yaxis.get_minor_ticks()]
    labels = {tick.get_loc(): tick.label2.get_text() for tick in ticks if tick.label2.get_text()}
    inside = {loss: label for loss, label in labels.items() if min(losses) <= loss <= max(losses)}
    assert len(inside) >= 2
    assert {loss: float(label.replace(",", "")) for loss, label in inside.items()} == pytest.approx(
        {loss: math.exp(loss) for loss in inside}, rel=1e-3
    )


@pytest.mark.parametrize(("x", "last"), [("tokens", 400_000), ("tokens", 800_000), ("step", 800_000)])
def test_labels_of_the_x_axis_do_not_overlap(tmp_path: Path, x: str, last: int) -> None:
    records = [{"step": value, "tokens_seen": value, "loss": 1.0, "lr": 1.0} for value in (1, last)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    axes = drawn_axes(tmp_path, "loss,lr", x=x)[0]
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert len(boxes) >= 4
    assert all(left.x1 + 4 < right.x0 for left, right in pairwise(boxes))


def test_several_runs_are_compared_without_event_marks(real_run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    plot([real_run, other], tmp_path / "both.svg", PlotOptions("grad_norm,time,loss", events=False))
    found = texts(tmp_path / "both.svg")
    assert {"real: all", "other: all", "real"} <= set(found)
    assert "restart" not in found


def test_runs_with_the_same_name_are_labelled_by_their_paths(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")]
    plot_loss(runs, tmp_path / "loss.svg")
    assert {f"{run}: all" for run in runs} <= set(texts(tmp_path / "loss.svg"))


def test_the_image_has_the_requested_size(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    plot([run], tmp_path / "loss.png", PlotOptions(width=3, height=2, dpi=100))
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (300, 200)


def test_a_grid_of_panels_with_too_many_pixels_is_refused(real_run: Path, tmp_path: Path) -> None:
    """One panel fits at 2,000 dots per inch; two panels next to each other have too many pixels."""
    with pytest.raises(ConfigError, match=r"--dpi 2000: must be 10 to 1785 for a plot of 11 x 3 inches"):
        plot([real_run], tmp_path / "both.svg", PlotOptions(what="loss,lr", dpi=2000))
    assert list(tmp_path.iterdir()) == []


def test_missing_and_non_finite_values_do_not_prevent_a_plot(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    values = ["null", "NaN", "2.0", "Infinity", "1.0"]
    lines = [f'{{"step": {step}, "loss": {value}, "mfu": null}}\n' for step, value in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(lines))
    plot_loss([run], tmp_path / "loss.png")
    assert BLUE in colours(tmp_path / "loss.png")


def test_curves_missing_in_all_runs_are_refused_and_in_some_runs_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], real_run: Path
) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(DataError, match=r"run: no validation in the records. Available: loss\.$"):
        plot([run], tmp_path / "x.png", PlotOptions("loss,validation"))
    with pytest.raises(DataError, match=r"a record has no 'time_unix'"):
        plot([run], tmp_path / "x.png", PlotOptions(x="time"))
    assert not (tmp_path / "x.png").exists()
    plot([run, real_run], tmp_path / "x.png", PlotOptions("validation"))
    assert capfd.readouterr().err == "run: no validation in the records\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PlotOptions("los"), r"--what los: unknown kind\. Known: loss, validation, .*, probes, all\."),
        (PlotOptions(","), r"--what \(empty\): unknown kind"),
        (PlotOptions(x="epoch"), r"--x epoch: unknown axis\. Known: step, tokens, time\."),
        (PlotOptions(smooth=1.0), r"--smooth 1: must be from 0 to 0\.999"),
        (PlotOptions(smooth=float("nan")), r"--smooth nan"),
        (PlotOptions(width=0.0), r"--width 0: must be 1 to 200 inches"),
        (PlotOptions(height=float("nan")), r"--height nan"),
        (PlotOptions(dpi=100_000), r"--dpi 100000: must be 10 to 2500"),
        (PlotOptions(file_format="pdf"), r"--format pdf: unknown format"),
    ],
)
def test_invalid_options_are_refused(options: PlotOptions, words: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=words):
        plot([run], tmp_path / "x.png", options)
