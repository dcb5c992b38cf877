"""Run as a script, by itself: loads an exported folder with plain transformers and writes down what it computes.

It must never import z2all_ds; the first lines make that impossible.
"""

import json
import sys

sys.modules["z2all_ds"] = None  # type: ignore[assignment]  # any import of the package now fails
sys.path.pop(0)  # this script's own folder

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

NEW_TOKENS = 40


def main() -> None:
    request = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    model = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=torch.float32).eval()
    assert type(model).__module__.startswith("transformers."), type(model)
    ids, generated = {}, {}
    for name, text in request["texts"].items():
        # split_special_tokens: control tokens spelled out in a document are text here, as they were in training.
        encoded = tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        ids[name] = encoded[: request["max_tokens"]]
        with torch.no_grad():
            logits = model(torch.tensor([ids[name]])).logits[0]
        torch.save(logits, f"{request['out']}/{name}.pt")
        prompt = torch.tensor([ids[name][:16]])
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        generated[tokenizer.decode(prompt[0])] = tokenizer.decode(made[0][prompt.shape[1] :])
    with open(f"{request['out']}/answer.json", "w", encoding="utf-8") as file:
        json.dump({"ids": ids, "generated": generated}, file, ensure_ascii=False)


if __name__ == "__main__":
    main()
