"""The command lines of the fuzzer: valid ones over the inputs of `inputs.py`, one line per way to use a verb."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A valid command line and the inputs that it reads."""

    command: str
    inputs: str
    """Names in the folder of inputs, separated by blanks; these are copied and damaged."""
    changes: tuple[str, ...] = ()
    """Patterns of input files that the verb may change or delete; all others must survive every case."""

    @property
    def arguments(self) -> list[str]:
        return self.command.split()

    @property
    def verb(self) -> str:
        words = self.arguments
        return "_".join(words[:2]) if words[0] in GROUPS else words[0]


GROUPS = ("corpus", "tokenizer", "checkpoint", "evaluate", "cluster", "track", "bench")
RUN = "run corpus tokenizer"
TRAINED = "run.yaml ds.json corpus tokenizer probes.yaml"
LINES = [
    Line("config --config run.yaml train.steps=3", "run.yaml"),
    Line('config --config run.yaml model.rope_scaling={"rope_type":"linear","factor":2}', "run.yaml"),
    Line("config --from-hf llama", "llama"),
    Line("doctor run --config run.yaml --json", f"run {TRAINED}"),
    Line("doctor --hostfile hosts.yaml --no-health", "hosts.yaml"),
    Line("quickstart --out out --fresh train.steps=4", "corpus run.yaml"),
    Line("plan --model run.yaml --gpus 2 --gpu h100 --measured measured.json", "run.yaml measured.json"),
    Line("plan --model run.yaml --sweep gpus=1,2 --gpu h100 --tokens 1B --out out.svg", "run.yaml ds.json"),
    Line("plan --model run.yaml --write out.yaml --gpu-memory 80GB --peak-tflops 300", "run.yaml"),
    Line("corpus convert generic raw/rows.jsonl --out out --fields content=content --workers 1", "raw"),
    Line("corpus convert generic raw/rows.json --form json_array --out out --fields content=content", "raw"),
    Line("corpus convert generic raw/rows.parquet --out out --form parquet --fields content=content", "raw"),
    Line("corpus convert generic raw/rows.zip --out out --form jsonl --fields content=content", "raw"),
    Line("corpus convert generic raw/rows.tar.gz --out out --form jsonl --fields content=content", "raw"),
    Line("corpus convert generic raw/rows.jsonl.bz2 --out out --fields content=content", "raw"),
    Line("corpus convert generic raw/rows.jsonl.zst --out out --fields content=content --on-error skip", "raw"),
    Line("corpus convert jsonl raw/rows.jsonl.gz --out out --on-error skip --max-bad-share 1.0", "raw"),
    Line("corpus convert text raw/plain.txt --out out --clean all", "raw"),
    Line("corpus build a=jsonl:raw/rows.jsonl b=text:raw/plain.txt --out out --workers 1", "raw"),
    Line("corpus sources --plugin plugin.py", "plugin.py"),
    Line("corpus report corpus", "corpus"),
    Line("corpus audit corpus --workers 1", "corpus"),
    Line("corpus stats corpus --workers 1 --plot out.png", "corpus"),
    Line("corpus stats corpus --tokenizer tokenizer --sample 0.5 --json", "corpus tokenizer"),
    Line("corpus sample corpus -n 2 --seed 3", "corpus"),
    Line("corpus sample corpus --gid 5", "corpus"),
    Line("corpus split corpus --out out --share 0.2 --workers 1", "corpus"),
    Line("corpus tokenize corpus --tokenizer tokenizer --out out --workers 1", "corpus tokenizer"),
    Line(
        "corpus tokenize corpus --tokenizer tokenizer --out tokens --workers 1",
        "corpus tokenizer tokens",
        ("tokens/*",),
    ),
    Line("corpus adopt adoptable --workers 1", "adoptable"),
    Line("corpus adopt corpus --workers 1 --replace", "corpus", ("corpus/MANIFEST.json",)),
    Line("corpus trace run --step 2", RUN),
    Line("bench step --config run.yaml --steps 4 --ranks 1", TRAINED),
    Line("bench step --config run.yaml --steps 4 --ablate --rows naive,fp8", TRAINED),
    Line("bench memory --config run.yaml --ranks 1", TRAINED),
    Line("bench checkpoint --config run.yaml --ranks 1 --dir . --rounds 2", TRAINED),
    Line("bench ops --config run.yaml --op rope --json", TRAINED),
    Line("bench floor --config run.yaml --rounds 1", TRAINED),
    Line("bench shapes --config run.yaml --hidden 32 --ffn 64 --vocab 128 --rounds 1", TRAINED),
    Line("bench tokenizer raw/plain.txt --bytes 2000 --vocab-size 300 --trainer bbpe", "raw"),
    Line("bench tokenizer corpus --weights en=1,zh=2", "corpus"),
    Line("bench data --corpus corpus --tokenizer tokenizer --megabytes 1 --no-peers --shards 0", "corpus tokenizer"),
    Line("bench order corpus --tokenizer tokenizer --epochs 1 --length 16 --lanes 2", "corpus tokenizer"),
    Line("corpus trace run --sample 5 --json", RUN),
    Line("tokenizer train raw/plain.txt --out out --vocab-size 270", "raw"),
    Line("tokenizer train corpus --out out --vocab-size 300 --weights en=1,zh=2", "corpus"),
    Line("tokenizer train corpus --out tokenizer --vocab-size 400", "corpus tokenizer"),
    Line("tokenizer import tokenizer/tokenizer.json --out out", "tokenizer"),
    Line("tokenizer import llama --out out --special <|PAD|>=406", "llama"),
    Line("tokenizer import spm.model --out out", "spm.model"),
    Line("tokenizer report tokenizer --corpus corpus", "tokenizer corpus"),
    Line("checkpoint list run", "run"),
    Line("checkpoint show run --json", "run"),
    Line("checkpoint verify run", "run"),
    Line("checkpoint prune run --keep-last 2", "run", ("run/checkpoints/*",)),
    Line("checkpoint import saved --run out --config run.yaml stages=[]", f"saved {TRAINED}"),
    Line("export run --out out --dtype fp32", RUN),
    Line("export run/checkpoints/step_00000003 --format z2all", RUN),
    Line("generate llama -p Hello --max-new-tokens 2", "llama"),
    Line(
        "generate llama --file prompts.jsonl --out out.jsonl --max-new-tokens 2 --temperature 0.5",
        "llama prompts.jsonl",
    ),
    Line("generate run -p 你好 --max-new-tokens 2 --chat", RUN),
    Line("evaluate ppl llama --data corpus --documents 2 --window 32", "llama corpus"),
    Line("evaluate ppl llama --data raw/rows.jsonl --documents 2 --packed", "llama raw"),
    Line("evaluate ppl llama --data raw/rows.parquet --documents 2 --stride 16", "llama raw"),
    Line("evaluate probes llama --file probes.yaml", "llama probes.yaml"),
    Line("evaluate probes run --file probes.yaml --newest", f"{RUN} probes.yaml"),
    Line("evaluate harness --include tasks --list", "tasks"),
    Line("evaluate harness llama --include tasks --tasks zh_school --limit 2 --out out.json", "llama tasks"),
    Line("train --config run.yaml --ranks 1", TRAINED),
    Line("train --config run.yaml train.init_from=llama --resume never", f"llama {TRAINED}"),
    Line("train run_dir=run data.corpus=corpus data.tokenizer=tokenizer preset=z2all_tiny", RUN, ("run/*",)),
    Line("train --config run.yaml data.corpus=tokens", f"tokens {TRAINED}"),
    Line("train parity --config run.yaml --stages 0,1 --jsons ds.json --ranks 1 --steps 2", TRAINED),
    Line("cluster overlay up --hostfile hosts.yaml --out out.yaml --kind vxlan --network 10.0.0.0/24", "hosts.yaml"),
    Line("cluster overlay down --hostfile hosts.txt", "hosts.txt"),
    Line("cluster overlay status --hostfile hosts.yaml --json", "hosts.yaml"),
    Line("launch --hostfile hosts.yaml --no-preflight --dry-run -- --config run.yaml", f"hosts.yaml {TRAINED}"),
    Line("launch --hostfile hosts.txt --no-preflight --dry-run -- --config run.yaml", f"hosts.txt {TRAINED}"),
    Line("plot run --out out.png --what all", "run"),
    Line("plot run --out out.svg --what loss,lr --smooth 0.5 --x tokens", "run"),
    Line("board run", "run"),
    Line("track sync run --to tensorboard", "run", ("run/sinks/*",)),
]
NOT_FUZZED = {
    "train run": "the lines of `train` run it",
    "bench corpus": "reads no file, and its numbers decide how long it runs",
    "bench optimizers": "reads no file, and its number decides how long it runs",
    "bench board": "reads no file, and its number decides how long it runs",
}
"""Verbs without a line, with the reason."""
