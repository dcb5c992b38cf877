"""Libraries hidden while transformers is imported: they are not loaded, and can be imported afterwards."""

import subprocess
import sys
from pathlib import Path

SEEN = """
import importlib.util, json, sys
from z2all_ds.train.speed.unused_libraries import left_unloaded
with left_unloaded(("idle", "json")):
    assert importlib.util.find_spec("idle") is None
    import z2all_ds.zero.engine
from transformers import PreTrainedModel
import idle
print(idle.WORD, "sklearn" in sys.modules)
"""


def test_hidden_libraries_can_be_imported_after_the_block(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("WORD = 'found'\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SEEN}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "found False"
