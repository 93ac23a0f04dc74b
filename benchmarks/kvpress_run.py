"""Child of peer_compaction.py, in an environment with kvpress: answers from texts whose caches its presses shortened.

    PYTHON benchmarks/kvpress_run.py CASE    # CASE: the JSON file that the parent wrote; a line of JSON for each answer

Knows no JAX. Every press gets the ids that we give our reader: what it shortens are the opening and the text.
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import kvpress  # pyright: ignore[reportMissingImports]  (in the environment that --python names)
import torch
import transformers


def main() -> int:
    case = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    words = {"dtype": getattr(torch, case["dtype"]), "attn_implementation": "sdpa"}
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(case["folder"], gguf_file=case["gguf"], **words)
    model = found.to(case["device"]).eval()
    if case["gguf"]:  # presses open the tokenizer by the model's name
        folder = Path(sys.argv[1]).with_name("tokenizer")
        transformers.AutoTokenizer.from_pretrained(case["folder"], gguf_file=case["gguf"]).save_pretrained(folder)
        model.config.name_or_path = str(folder)
    rows = ((one, ratio) for one in case["presses"] for ratio in case["ratios"])
    for name, ratio in (("text", 1), ("nothing", 1), *rows):
        press = make(name, ratio, model)
        if isinstance(press, str):
            print(json.dumps({"press": name, "ratio": ratio, "error": press}), flush=True)
            continue
        for number, whole in enumerate(case["questions"]):
            question = whole | {"text": []} if name == "nothing" else whole
            try:
                with torch.inference_mode():
                    row = answer(model, press, question, case)
            except ValueError as error:  # presses hide keys behind others that no query may see; a tiny model has none
                row = {"error": str(error)}
            print(json.dumps({"press": name, "ratio": ratio, "question": number} | row), flush=True)
    return 0


def make(name: str, ratio: int, model: Any) -> Any:
    """Returns a press that keeps one of `ratio` keys, None for none, or why it says nothing of this model."""
    if name in ("text", "nothing"):
        return None
    press = getattr(kvpress, name)(compression_ratio=1 - 1 / ratio)
    if name == "FastKVzipPress":
        from kvpress.presses import fastkvzip_press  # pyright: ignore[reportMissingImports]

        try:  # without its trained gates the press draws random ones
            press.gates = fastkvzip_press.load_fastkvzip(model.config.name_or_path, device=str(model.device))
        except (OSError, ValueError) as error:
            return f"no trained gates for this model: {str(error).splitlines()[0]}"
    return press


def answer(model: Any, press: Any, question: dict[str, list[int]], case: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer's ids and nats, the seconds of reading and shortening, and the bytes of cache that are left."""
    ids = {key: torch.tensor([value], dtype=torch.long, device=model.device) for key, value in question.items()}
    cache: Any = transformers.DynamicCache()
    context = torch.cat([ids["before"], ids["text"]], dim=1)
    length, started = context.shape[1], time.perf_counter()
    with press(model) if press else contextlib.nullcontext():
        model(input_ids=context, past_key_values=cache, logits_to_keep=1)
        if hasattr(press, "prefix_length"):  # of KVzip: it takes the chat template's, and ours has a system prompt
            press.prefix_length = ids["before"].shape[1]
    if case["device"] == "cuda":
        torch.cuda.synchronize()
    seconds, sizes = time.perf_counter() - started, [one.keys.shape[2] for one in cache.layers]
    held = left(model, cache)
    behind = torch.cat([ids["after"], ids["answer"]], dim=1)
    logits = forward(model, cache, behind, length)[0, ids["after"].shape[1] - 1 : -1]
    nats = torch.nn.functional.cross_entropy(logits.float(), ids["answer"][0], reduction="sum")
    for layer, size in zip(cache.layers, sizes, strict=True):  # without question and answer
        layer.keys, layer.values = layer.keys[:, :, :size], layer.values[:, :, :size]
    row = {"write_seconds": seconds, "nll": float(nats), "tokens": len(question["answer"]), **held}
    return row | {"ids": generate(model, cache, ids["after"], length, case)}


def generate(model: Any, cache: Any, after: Any, length: int, case: dict[str, Any]) -> list[int]:
    found, ids, place = [], after, length
    for _ in range(case["max_new_tokens"]):
        token = int(forward(model, cache, ids, place)[0, -1].argmax())
        if token in case["stops"]:
            break
        place, ids = place + ids.shape[1], torch.tensor([[token]], device=model.device)
        found.append(token)
    return found


def forward(model: Any, cache: Any, ids: Any, place: int) -> Any:
    """Returns logits of tokens at positions from `place` on: behind the text, whatever is left of it."""
    positions = torch.arange(place, place + ids.shape[1], device=ids.device)[None]
    return model(input_ids=ids, past_key_values=cache, position_ids=positions).logits


def left(model: Any, cache: Any) -> dict[str, Any]:
    """Returns the positions of a head, on the average, and bytes: of those that count, and as the cache holds them.

    Presses with a share for each head mask keys and keep their memory.
    """
    heads = model.config.num_key_value_heads
    keys = [one.keys for one in cache.layers]
    held = sum(2 * one.numel() * one.element_size() for one in keys)
    hidden = [getattr(one.self_attn, "masked_key_indices", None) for one in model.model.layers]
    masked = sum(len(one[0]) for one in hidden if one is not None)
    each = keys[0].shape[3] * keys[0].element_size() * 2
    positions = (sum(one.shape[2] for one in keys) * heads - masked) / (heads * len(keys))
    return {"positions": positions, "kept_bytes": held - masked * each, "held_bytes": held}


if __name__ == "__main__":
    sys.exit(main())
