import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import ended
from z2all_ds.base.errors import DataError, MachineError
from z2all_ds.tokenizer.learning import learn_in_own_process


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("the cat sat on the mat\n" * 2000)
    return path


def test_the_tokenizer_files_and_the_bytes_read_are_returned(words: Path, capfd: pytest.CaptureFixture[str]) -> None:
    size = words.stat().st_size
    files, text_bytes = learn_in_own_process("bbpe", [f"en={words}"], {"en": size}, 262)
    assert files.keys() == {"tokenizer.json"}
    assert text_bytes == size
    files, _ = learn_in_own_process("spm", [f"en={words}"], {"en": size}, 272)
    assert files.keys() == {"tokenizer.json", "sentencepiece.model"}
    said = capfd.readouterr().err
    assert "reading text: 0 MB" in said and "merging" in said
    assert "Compute merges" not in said


def test_errors_in_the_child_process_are_raised_in_the_parent(words: Path) -> None:
    with pytest.raises(DataError, match="vocabulary size 5000: the corpus has only enough repeated text for"):
        learn_in_own_process("bbpe", [str(words)], {"words": 1000}, 5000)
    words.write_bytes(b"\xff\xff")
    for algorithm in ("bbpe", "spm"):
        with pytest.raises(DataError, match=r"words\.txt: not UTF-8"):
            learn_in_own_process(algorithm, [str(words)], {"words": 1000}, 300)


def test_a_child_process_that_dies_is_reported(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=r"exit code 1: .*KeyError: 'nothing'"):
        learn_in_own_process("bbpe", [str(words)], {"nothing": 1000}, 300)

    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises((MachineError, BrokenPipeError)):
        learn_in_own_process("bbpe", [str(words)], {"words": 1000}, 300)


def test_the_child_process_ends_when_its_parent_is_killed(words: Path) -> None:
    words.write_text("".join(chr(0x4E00 + (n * n) % 20000) for n in range(3_000_000)))
    code = (
        "import sys; from z2all_ds.tokenizer.learning import learn_in_own_process as learn; "
        "learn('spm', [sys.argv[1]], {'words': 10**9}, 60_000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(words)], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    with ended(process):
        for line in process.stderr:
            if line.startswith("merging"):
                break
        children = psutil.Process(process.pid).children()
        process.kill()
        process.stderr.close()
    assert len(children) == 1
    assert psutil.wait_procs(children, timeout=300)[1] == []


@pytest.mark.processes
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know PYTHONSAFEPATH")
def test_modules_in_the_current_folder_are_not_imported(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(words.parent)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("Z2ALL_TEST_FRESH", "1")  # a fork of the warm process has imported everything
    for planted in ("tokenizers.py", "z2all_ds.py"):
        Path(planted).write_text("open('imported', 'w')")
    learn_in_own_process("bbpe", [f"en={words}"], {"en": words.stat().st_size}, 262)
    assert not Path("imported").exists()
