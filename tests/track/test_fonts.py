"""Fonts of plots: characters are drawn, not replaced by boxes."""

import importlib.util
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont

from z2all_ds.track.fonts import OWN_FAMILY, PlotFonts, fonts_for

CHINESE = fonts_for(["中文国语"])
needs_chinese = pytest.mark.skipif(bool(CHINESE.unknown), reason="no font with Chinese characters on this machine")
WITHOUT_FONTS = """
import sys
from matplotlib import font_manager
font_manager.fontManager.ttflist = [font for font in font_manager.fontManager.ttflist if "mpl-data" in font.fname]
font_manager.findSystemFonts = list
from pathlib import Path
from z2all_ds.track.plots import plot_loss
print(plot_loss([Path(sys.argv[1])], Path(sys.argv[2])))
"""


def pixels(text: str, families: tuple[str, ...]) -> np.ndarray:
    with matplotlib.rc_context({"font.family": list(families)}):
        figure = Figure(figsize=(2, 1))
        figure.text(0.1, 0.3, text, fontsize=30)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="rgba")
    return np.frombuffer(drawn.getvalue(), dtype=np.uint8)


def test_the_default_font_covers_latin_and_cyrillic_text() -> None:
    assert fonts_for(["loss", "Größe", "потеря", "a_b$<&>"]) == PlotFonts((OWN_FAMILY,), frozenset())
    assert fonts_for(["tab\tand\x00"]).families == (OWN_FAMILY,)


@needs_chinese
def test_chinese_characters_are_drawn() -> None:
    assert CHINESE.families[0] == OWN_FAMILY
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        words = [pixels(word, CHINESE.families) for word in ("中文", "国语", "中国")]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        boxes = pixels("中文", (OWN_FAMILY,))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (words[one] != words[other]).any()
    assert (words[0] != boxes).any()


def test_characters_without_a_font_are_written_as_code_points() -> None:
    fonts = PlotFonts((OWN_FAMILY,), frozenset("中文"))
    assert fonts.drawable("a中文b") == "a U+4E2D U+6587 b"
    assert fonts.drawable("two\nlines\udc80") == "two lines U+DC80"
    assert fonts.note is not None
    assert "pip install 'z2all_ds[fonts]'" in fonts.note


def plot_without_fonts(tmp_path: Path, python_path: str = "") -> subprocess.CompletedProcess[str]:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "loss_of_中文": 2.5}\n', encoding="utf-8")
    command = [sys.executable, "-W", "error::UserWarning", "-c", WITHOUT_FONTS, str(run), str(tmp_path / "loss.svg")]
    path = os.pathsep.join(part for part in (python_path, os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_a_plot_on_a_machine_without_fonts_uses_code_points(tmp_path: Path) -> None:
    if importlib.util.find_spec("mplfonts"):
        pytest.skip("mplfonts is installed: there is a font")
    result = plot_without_fonts(tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [
        "no font on this machine has 中 文: written as code points; "
        "`pip install 'z2all_ds[fonts]'` installs a font for Chinese"
    ]
    assert "<!-- U+4E2D U+6587 -->" in (tmp_path / "loss.svg").read_text(encoding="utf-8")


@needs_chinese
def test_fonts_of_the_package_mplfonts_are_used_without_importing_it(tmp_path: Path) -> None:
    """The test imitates the layout of the package; its `__init__.py` raises an error if it is imported."""
    package = tmp_path / "packages" / "mplfonts"
    (package / "fonts").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "fonts" / "NotoSansCJKsc-Regular.ttf").symlink_to(findfont(CHINESE.families[-1]))
    result = plot_without_fonts(tmp_path, str(tmp_path / "packages"))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "<!-- 中文 -->" in (tmp_path / "loss.svg").read_text(encoding="utf-8")
