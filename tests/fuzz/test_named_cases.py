"""Cases that once ended in a traceback, each under its name."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from tests.fuzz.cases import copy_inputs, judge
from tests.fuzz.inputs import reseal
from tests.fuzz.verbs import LINES, Line
from tests.helpers.small_disk import small_disk

Damage = Callable[[Path], Any]


def line_of(beginning: str) -> Line:
    return next(line for line in LINES if line.command.startswith(beginning))


def change(name: str, edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Return damage that edits a JSON file; manifests of checkpoints are written again."""

    def damage(work: Path) -> None:
        content = json.loads((work / name).read_text())
        edit(content)
        (work / name).write_text(json.dumps(content))
        reseal(work)

    return damage


def change_yaml(name: str, edit: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(work: Path) -> None:
        content = yaml.safe_load((work / name).read_text())
        edit(content)
        (work / name).write_text(yaml.safe_dump(content))

    return damage


def setting(name: str, **values: Any) -> Damage:
    return change(name, lambda content: content.update(values))


def write(name: str, content: bytes) -> Damage:
    def damage(work: Path) -> None:
        (work / name).write_bytes(content)
        reseal(work)

    return damage


def unreadable(name: str) -> Damage:
    return lambda work: (work / name).chmod(0)


def link_to_itself(work: Path) -> None:
    shutil.rmtree(work / "run")
    (work / "run").symlink_to("run")


def cut(name: str) -> Damage:
    return lambda work: (work / name).write_bytes((work / name).read_bytes()[:-100])


def with_prefix(rules: dict[str, Any]) -> None:
    """Without a check, this aborts the whole process."""
    rules["model"]["continuing_subword_prefix"] = "x"


GENERATE, IMPORT = "generate llama -p", "tokenizer import tokenizer"
INIT = "train --config run.yaml train.init_from=llama"
CONFIG, TOKENIZER, STEP = "llama/config.json", "tokenizer/tokenizer.json", "run/checkpoints/step_00000007"
DEEP = b'{"a":' * 5000
THREE_HEADS = b'{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 3}'
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
STRIDE = {"max_length": 1, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}
CASES: dict[str, tuple[str, Damage]] = {
    # unreadable files
    "config": ("config --config run.yaml train", unreadable("run.yaml")),
    "plan": ("plan --model run.yaml --gpus", unreadable("measured.json")),
    "raw text": ("corpus convert generic raw/rows.jsonl", unreadable("raw/rows.jsonl")),
    "raw folder": ("corpus convert generic raw/rows.jsonl", unreadable("raw")),
    "shard": ("corpus audit", unreadable("corpus/en-00000.jsonl")),
    "manifest": ("corpus stats", unreadable("corpus/MANIFEST.json")),
    "tokenizer": (IMPORT, unreadable(TOKENIZER)),
    "tokenizer report": ("tokenizer report", unreadable("tokenizer")),
    "weights": (GENERATE, unreadable("llama/model.safetensors")),
    "prompts": ("generate llama --file", unreadable("prompts.jsonl")),
    "checkpoint": ("checkpoint verify", unreadable(f"{STEP}/trainer.json")),
    "metrics": ("plot run", unreadable("run/metrics.jsonl")),
    "hostfile": ("launch --hostfile hosts.yaml", unreadable("hosts.yaml")),
    # Hugging Face folders
    "no weights": (GENERATE, lambda work: (work / "llama/model.safetensors").unlink()),
    "cut weights": (GENERATE, cut("llama/model.safetensors")),
    "empty weights": (GENERATE, write("llama/model.safetensors", b"")),
    "config is a list": (GENERATE, write(CONFIG, b"[]")),
    "config is empty": (GENERATE, write(CONFIG, b"")),
    "config is deep": (GENERATE, write(CONFIG, DEEP)),
    "config has text for a size": (GENERATE, setting(CONFIG, hidden_size="x")),
    "config has null heads": (GENERATE, setting(CONFIG, num_attention_heads=0)),
    "config is huge": (GENERATE, setting(CONFIG, intermediate_size=10**9)),
    "config has many layers": (GENERATE, setting(CONFIG, num_hidden_layers=10**30)),
    "config has a negative number of layers": (GENERATE, setting(CONFIG, num_hidden_layers=-1)),
    "head_dim is not a number": (INIT, setting(CONFIG, head_dim={"a": 1})),
    "heads do not divide the hidden size": (INIT, write(CONFIG, THREE_HEADS)),
    "an id with many digits": (GENERATE, setting("llama/generation_config.json", eos_token_id=10**30)),
    "unknown model type": (GENERATE, setting(CONFIG, model_type="nope")),
    "own code": (
        GENERATE,
        setting(CONFIG, model_type="x", auto_map={"AutoConfig": "code.C"}),
    ),
    "wrong rope": ("config --from-hf", setting(CONFIG, rope_parameters=[1])),
    "tokenizer config is a list": (GENERATE, write("llama/tokenizer_config.json", b"[]")),
    "tokenizer class is a number": (
        GENERATE,
        setting("llama/tokenizer_config.json", tokenizer_class=5),
    ),
    # tokenizer.json: Rust code panics
    "template": (IMPORT, setting(TOKENIZER, post_processor=TEMPLATE)),
    "template in a model": (GENERATE, setting("llama/tokenizer.json", post_processor=TEMPLATE)),
    "stride": ("corpus tokenize", setting(TOKENIZER, truncation=STRIDE)),
    "character map": (
        IMPORT,
        setting(TOKENIZER, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ),
    "length 0": (
        "corpus stats corpus --tokenizer",
        setting(TOKENIZER, pre_tokenizer={"type": "FixedLength", "length": 0}),
    ),
    "merges without their prefix": (IMPORT, change(TOKENIZER, with_prefix)),
    "an id of 4 billion": (
        "tokenizer import llama",
        change("llama/tokenizer.json", lambda c: c["model"]["vocab"].update(zz=4_000_000_000)),
    ),
    "merges of a model without their prefix": (GENERATE, change("llama/tokenizer.json", with_prefix)),
    "tokenizer is deep": (IMPORT, write(TOKENIZER, DEEP)),
    "an added token without text": (
        "train --config run.yaml train.init_from=llama",
        change("llama/tokenizer.json", lambda c: c["added_tokens"][0].pop("content")),
    ),
    "an id is text": (
        "train --config run.yaml train.init_from=llama",
        change("llama/tokenizer.json", lambda c: c["added_tokens"][0].update(id="5")),
    ),
    "tokenizer config is deep": ("train --config run.yaml --ranks", write("tokenizer/tokenizer_config.json", DEEP)),
    # checkpoints with valid checksums and wrong types
    "trainer is a list": ("export run --out", write(f"{STEP}/trainer.json", b"[]")),
    "trainer is deep": ("checkpoint show", write(f"{STEP}/trainer.json", DEEP)),
    "model is a list": ("generate run", setting(f"{STEP}/trainer.json", model=[1])),
    "data state is a number": ("corpus trace run --sample", write(f"{STEP}/data_state.json", b"5")),
    "position is a fraction": ("corpus trace run --sample", setting(f"{STEP}/data_state.json", position=0.5)),
    "position is text": ("corpus trace run --sample", setting(f"{STEP}/data_state.json", position="x")),
    "shapes are text": ("export run --out", setting(f"{STEP}/state/index.json", shapes="x")),
    "pieces are short": (
        "export run --out",
        change(f"{STEP}/state/index.json", lambda c: c["pieces"]["weight"].update({"model.norm.weight": [[0]]})),
    ),
    "environment is odd": ("export run/checkpoints", setting("run/environment.json", device={"a": 1})),
    "a step is text": ("board run", write("run/metrics.jsonl", b'{"step": 1}\n{"step": "2"}\n{"step": 3}\n')),
    "training record is odd": (
        "tokenizer train corpus --out tokenizer",
        change("tokenizer/training.json", lambda c: c["bytes_per_token"].update(en="x")),
    ),
    "pieces are no list": (
        "export run --out",
        change(f"{STEP}/state/index.json", lambda c: c["pieces"]["weight"].update({"model.norm.weight": {}})),
    ),
    "no format": ("evaluate probes run", change(f"{STEP}/state/index.json", lambda c: c.pop("format"))),
    "validation loss is text": ("checkpoint list", setting(f"{STEP}/trainer.json", validation_loss="x")),
    # YAML and records
    "a record with many digits": ("corpus split", write("corpus/en-00000.jsonl", b'{"gid": %s}' % (b"9" * 5000))),
    "date": ("train --config run.yaml --ranks", write("run.yaml", b"train: {steps: 2024-01-01}")),
    "many digits": ("config --config run.yaml train", write("run.yaml", b"train: {steps: %s}" % (b"9" * 5000))),
    "digits in a DeepSpeed JSON": ("plan --model run.yaml --sweep", write("ds.json", b'{"a": %s}' % (b"9" * 5000))),
    "deep DeepSpeed JSON": ("plan --model run.yaml --sweep", write("ds.json", DEEP)),
    "deep lines": ("corpus adopt adoptable", write("adoptable/rows.jsonl", DEEP)),
    "a billion layers": ("plan --model run.yaml --write", write("run.yaml", b"model: {num_hidden_layers: 1000000000}")),
    "a huge vocabulary": ("checkpoint import", write("run.yaml", b"model: {vocab_size: 1%s}" % (b"0" * 30))),
    "track is a number": ("track sync run", change_yaml("run/run.yaml", lambda c: c.update(track=-1))),
    "large initial weights": (
        "evaluate probes run",
        change_yaml("run/run.yaml", lambda c: c["model"].update(initializer_range=1e30)),
    ),
    "a record is a number": ("plot run --out out.svg", write("run/metrics.jsonl", b"-1\n")),
    "tokens are a list": ("plot run --out out.svg", write("run/metrics.jsonl", b'{"step": 1, "tokens_seen": []}\n')),
    "tokens are not a number": (
        "plot run --out out.svg",
        write("run/metrics.jsonl", b'{"step": 1, "tokens_seen": NaN}\n{"step": 8, "tokens_seen": 5, "loss": 1}\n'),
    ),
    "deep YAML": ("launch --hostfile hosts.yaml", write("hosts.yaml", b"[" * 5000)),
    "deep probes": ("evaluate probes llama", write("probes.yaml", b"[" * 5000)),
    "link to itself": ("checkpoint list", link_to_itself),
}  # fmt: skip
ARGUMENTS = {
    "no such user": "~nouser/x",
    "a long name": "a" * 300,
    "a long path": "a/" * 3000,
    "a loop": "loop",
    "below a loop": "loop/x",
    "a link to nothing": "dangling",
    "empty": "",
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("name", CASES)
def test_damage(name: str, inputs: Path) -> None:
    beginning, damage = CASES[name]
    line, work = line_of(beginning), inputs.parent / f"named_{list(CASES).index(name)}"
    copy_inputs(line, inputs, work)
    damage(work)
    failure = judge(line, line.arguments, work, name)
    shutil.rmtree(work)
    assert failure is None, failure.problem


@pytest.mark.parametrize("name", ARGUMENTS)
def test_paths(name: str, inputs: Path) -> None:
    """Every output and half of the inputs of every command line, replaced by a strange path."""
    for number, line in enumerate(LINES):
        for position, argument in enumerate(line.arguments):
            is_output = argument.startswith("out")
            if argument not in line.inputs.split() and not is_output and not argument.startswith("hosts"):
                continue
            if not is_output and Random(f"{name} {number} {position}").random() > 0.5:
                continue
            work = inputs.parent / f"paths_{number}_{position}"
            copy_inputs(line, inputs, work)
            arguments = [*line.arguments[:position], ARGUMENTS[name], *line.arguments[position + 1 :]]
            failure = judge(line, arguments, work, f"{arguments}")
            shutil.rmtree(work)
            assert failure is None, f"{failure.case}\n{failure.problem}"


@pytest.mark.parametrize(
    ("beginning", "output"), [("tokenizer train raw", "out_disk/x"), ("plot run --out out.png", "out_disk/x.png")]
)
def test_full_disk(beginning: str, output: str, inputs: Path) -> None:
    line, work = line_of(beginning), inputs.parent / "full"
    copy_inputs(line, inputs, work)
    arguments = [output if before == "--out" else one for before, one in pairwise(["", *line.arguments])]
    with small_disk(work / "out_disk", 4096):
        failure = judge(line, arguments, work, beginning)
        left = list((work / "out_disk").iterdir())
    shutil.rmtree(work)
    assert failure is None, failure.problem
    assert not left
