"""Script that loads an exported folder as a user would and writes the logits that it computes.

    standalone_check.py llama    plain transformers; importing z2all_ds is made impossible
    standalone_check.py z2all    with this package, which registers its model class

The request is JSON on stdin. A model that fits into memory is loaded with `from_pretrained`; of a larger one, the
layers are read from the files one after the other.
"""

import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path = [folder for folder in sys.path if folder != str(HERE)]  # Python puts a script's folder first
FORMAT = sys.argv[1]
if FORMAT == "llama":
    sys.modules["z2all_ds"] = None  # type: ignore[assignment]  # any import of the package now fails
else:
    sys.path.insert(0, str(HERE.parents[1]))
    import z2all_ds.model  # registers it with transformers

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

sys.path.insert(0, str(HERE))
# As files, not as parts of the package.
layerwise_logits = importlib.import_module("layerwise_logits").layerwise_logits
text_parts = importlib.import_module("whole_characters")
sys.path.remove(str(HERE))

PROMPT_TOKENS = 16
NEW_TOKENS = 40
MODEL_PACKAGES = {"llama": "transformers.", "z2all": "z2all_ds."}
FUSED = {} if FORMAT == "llama" else z2all_ds.model.stock_keys.STOCK_PARTS
"""Fused module of the model -> the modules in the files that it consists of, in row order."""


def main() -> None:
    request = json.load(sys.stdin)
    folder, out = Path(request["folder"]), Path(request["out"])
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = {}
    for name, text in request["texts"].items():
        # split_special_tokens: control tokens spelled out in a document are plain text, as in training.
        encoded = tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        ids[name] = encoded[: request["max_tokens"]]
    compared = [*ids.values(), *request["fixed_ids"]]
    if request["whole"]:
        generated = whole_model(folder, out, tokenizer, compared, len(ids))
    else:
        generated = layer_by_layer(folder, out, compared)
    answer = json.dumps({"ids": ids, "generated": generated}, ensure_ascii=False)
    (out / "answer.json").write_text(answer, encoding="utf-8")


def whole_model(
    folder: Path, out: Path, tokenizer: AutoTokenizer, compared: list[list[int]], num_texts: int
) -> dict[str, str]:
    """Write the logits of each list of tokens; return greedy continuations of the first ones, which are texts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    require_model_class(model)
    generated = {}
    for number, tokens in enumerate(compared):
        with torch.no_grad():
            torch.save(model(torch.tensor([tokens])).logits[0], out / f"{number}.pt")
        if number >= num_texts:
            continue
        prompt = torch.tensor([text_parts.whole_prompt(tokenizer.decode, tokens, PROMPT_TOKENS)])
        mask = torch.ones_like(prompt)
        made = model.generate(prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        continuation = tokenizer.decode(made[0][prompt.shape[1] :])
        generated[tokenizer.decode(prompt[0])] = text_parts.without_cut_end(continuation)
    return generated


def layer_by_layer(folder: Path, out: Path, compared: list[list[int]]) -> dict[str, str]:
    """Write the logits of each list of tokens. Generate nothing, since every token would read all weights again."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    require_model_class(model)
    if FORMAT == "llama":
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # not in the files: computed from the config
    for number, logits in enumerate(layerwise_logits(model, weights_of(folder), compared)):
        torch.save(logits, out / f"{number}.pt")
    return {}


def weights_of(folder: Path):  # type: ignore[no-untyped-def]
    """Return a function that reads one weight by its name, in fp32."""
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}

    def read(name: str) -> Tensor:
        for fused, stock_names in FUSED.items():
            if f".{fused}." in name:
                return torch.cat([read(name.replace(fused, stock)) for stock in stock_names])
        # Opened for each weight: an open file counts as memory in full.
        with safe_open(folder / files.get(name, "model.safetensors"), framework="pt") as file:
            return file.get_tensor(name).to(torch.float32, copy=True)

    return read


def require_model_class(model: torch.nn.Module) -> None:
    assert type(model).__module__.startswith(MODEL_PACKAGES[FORMAT]), type(model)


if __name__ == "__main__":
    main()
