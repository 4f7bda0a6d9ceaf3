"""Measure an exported model: loss, exact match, how often drafts are right, how even the routing is, samples.

Exact match needs no generation: greedy decoding gives the expected answer if and only if, with that answer as input,
every next token is the most likely one. In the same way a greedy draft is accepted exactly when it equals the token
that follows in the text the model itself wrote. Nothing measured here was trained on, except that short generated
documents (a capital, a greeting) are few and come up in both streams.

    python -m recipes.tiny.evaluate tripool/models/tiny --json recipes/tiny/evaluation.json
"""

import argparse
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

from recipes.tiny import chat
from recipes.tiny.batches import BOS_ID, EOS_ID, HELD_OUT_SEED, split_novels
from recipes.tiny.model import Shape, TinyDeepseek, load_published
from recipes.tiny.text.documents import Document, documents
from recipes.tiny.train import OUT

ROW = 512
SAMPLES: tuple[tuple[str, bool], ...] = (
    ("Once upon a time", False),
    ("Hello!", False),
    ("Who are you?", False),
    ("Tell me a story about a fox and a kite.", False),
    ("Write a short story about a girl named Mia and a green boat.", False),
    ("What is the capital of Japan?", False),
    ("Why is the sky blue?", False),
    ("What is 7 + 5?", False),
    ("What is 47 + 38?", True),
    ("Tom has 9 apples. Then Tom finds 4 more. How many apples does Tom have now?", True),
    ("Sort these numbers: 12, 3, 17, 8", False),
    ("Reverse this list: fox, ball, tree, hat", False),
    ("Name three animals.", False),
    ("How do I make pancakes?", False),
    ("Write a Python function that adds two numbers.", False),
    ("中国的首都是哪里？", False),
)


def folder_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def load(folder: Path) -> tuple[TinyDeepseek, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return load_published(load_file(folder / "model.safetensors"), Shape()), tokenizer


def held_out() -> Iterable[Document]:
    return documents(HELD_OUT_SEED)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def rows_of(token_lists: Iterable[list[int]], num_rows: int) -> Tensor:
    """Rows that start at the start of a text and are filled with the following texts."""
    rows: list[list[int]] = []
    row: list[int] = []
    for tokens in token_lists:
        row += tokens
        if len(row) >= ROW:
            rows.append(row[:ROW])
            row = []
        if len(rows) == num_rows:
            break
    return torch.tensor(rows)


def prose_rows(tokenizer: Tokenizer, novels: Path, num_rows: int) -> Tensor:
    _, blocks = split_novels(novels)
    stream = encode(tokenizer, "\n".join(blocks))
    windows = [[BOS_ID, *stream[i : i + ROW - 1]] for i in range(0, len(stream) - ROW, ROW - 1)]
    return torch.tensor(windows[:num_rows])


@torch.inference_mode()
def text_loss(model: TinyDeepseek, token_BS: Tensor) -> dict[str, float]:
    """Loss of the model and of its draft in nats per token, and how often both have the same favourite."""
    sums: dict[str, float] = defaultdict(float)
    for row in token_BS.split(4):
        hidden = model.hidden(row)
        logits = model.lm_head(hidden[:, :-1])
        draft = model.lm_head(model.draft_hidden(hidden[:, :-1], row[:, :-1])[:, 1:])
        sums["loss"] += F.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum").item()
        sums["mtp_loss"] += F.cross_entropy(draft.flatten(0, 1), row[:, 2:].flatten(), reduction="sum").item()
        sums["agreement"] += (draft.argmax(-1) == logits[:, 1:].argmax(-1)).sum().item()
        sums["num"] += row[:, 1:].numel()
        sums["num_mtp"] += row[:, 2:].numel()
    return {
        "num_tokens": int(sums["num"]),
        "loss": sums["loss"] / sums["num"],
        "mtp_loss": sums["mtp_loss"] / sums["num_mtp"],
        "draft_agreement": sums["agreement"] / sums["num_mtp"],
    }


@torch.inference_mode()
def right_tokens(model: TinyDeepseek, tokenizer: Tokenizer, document: Document) -> Tensor:
    """For each token of the right answer and its end: is it the most likely one after those before it?"""
    prompt = encode(tokenizer, document.prompt)
    answer = [*encode(tokenizer, document.answer), EOS_ID]
    token_BS = torch.tensor([prompt + answer])
    logits = model.lm_head(model.hidden(token_BS)[0, len(prompt) - 1 : -1])
    return logits.argmax(-1) == token_BS[0, len(prompt) :]


def exact_match(model: TinyDeepseek, tokenizer: Tokenizer, num_each: int) -> dict[str, dict[str, float]]:
    """Per task, over the first documents of the held-out stream: the share of right answers, and of right tokens."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for document in islice(held_out(), 100 * num_each):
        if document.is_exact and len(found[document.task]) < num_each:
            found[document.task].append(right_tokens(model, tokenizer, document))
    return {
        task: {
            "num": len(answers),
            "score": sum(bool(right.all()) for right in answers) / len(answers),
            "token_accuracy": torch.cat(answers).float().mean().item(),
        }
        for task, answers in sorted(found.items())
    }


@torch.inference_mode()
def routing_skew(model: TinyDeepseek, token_BS: Tensor) -> list[float]:
    """Load of the busiest expert over the mean, for each MoE layer and the MTP layer."""
    for moe in model.moes():
        moe.load.zero_()
    for row in token_BS.split(4):
        model.draft_hidden(model.hidden(row), row)
    return [(moe.load.max() / moe.load.mean()).item() for moe in model.moes()]


def domains(tokenizer: Tokenizer, num_rows: int) -> dict[str, Tensor]:
    """Rows of one kind of text each."""
    kinds = {
        "stories": ("story",), "arithmetic": ("arithmetic", "arithmetic_think"), "code": ("code", "json"),
        "tools": ("tool_call", "tool_answer"), "chinese": ("chinese",), "lists": ("ordering", "ordering_think"),
    }  # fmt: skip
    found = {}
    for name, tasks in kinds.items():
        stream = (encode(tokenizer, d.text) for d in held_out() if d.task in tasks)
        found[name] = rows_of(stream, num_rows)
    return found


@torch.inference_mode()
def write(peer: DeepseekV3ForCausalLM, prompt: list[int], num_new: int) -> list[int]:
    """Greedy decoding."""
    output = peer.generate(
        torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False, temperature=None, top_p=None, pad_token_id=2
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def accepted_drafts(model: TinyDeepseek, prompt: list[int], written: list[int]) -> tuple[int, int]:
    """Of the drafts made while this text was decoded greedily: right ones, all."""
    token_BS = torch.tensor([prompt + written])
    draft = model.lm_head(model.draft_hidden(model.hidden(token_BS), token_BS)[0, len(prompt) : -1]).argmax(-1)
    return int((draft == token_BS[0, len(prompt) + 1 :]).sum()), len(draft)


def samples(
    folder: Path, model: TinyDeepseek, tokenizer: Tokenizer, num_samples: int
) -> tuple[list[dict], dict[str, float]]:
    """Greedy answers, and the share of drafts accepted while writing them."""
    peer = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found, right, made = [], 0, 0
    for text, thinking in SAMPLES[:num_samples]:
        is_plain = text == "Once upon a time"
        rendered = chat.BOS + text if is_plain else chat.render([{"role": "user", "content": text}], thinking=thinking)
        prompt = encode(tokenizer, rendered)
        written = write(peer, prompt, 160)
        accepted, drafted = accepted_drafts(model, prompt, written)
        right, made = right + accepted, made + drafted
        answer = tokenizer.decode(written, skip_special_tokens=True)
        found.append({"prompt": text, "thinking": thinking, "is_plain": is_plain, "answer": answer})
    return found, {"accepted": right, "drafted": made, "rate": right / made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--novels", type=Path, default=OUT / "novels.txt")
    parser.add_argument("--rows", type=int, default=30, help=f"rows of {ROW} tokens per loss")
    parser.add_argument("--each", type=int, default=20, help="exact-match documents per task")
    parser.add_argument("--samples", type=int, default=len(SAMPLES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    model, tokenizer = load(arguments.folder)
    texts = {
        "generated": rows_of((encode(tokenizer, d.text) for d in held_out()), arguments.rows),
        "prose": prose_rows(tokenizer, arguments.novels, arguments.rows),
    }
    skewed = {"prose": texts["prose"][:8], **domains(tokenizer, 8)}
    written, acceptance = samples(arguments.folder, model, tokenizer, arguments.samples)
    result = {
        "sha256": folder_sha256(arguments.folder),
        "num_parameters": sum(tensor.numel() for tensor in model.state_dict().values()),
        "num_bytes": sum(f.stat().st_size for f in arguments.folder.iterdir() if f.name != "README.md"),
        "loss": {name: text_loss(model, rows) for name, rows in texts.items()},
        "exact_match": exact_match(model, tokenizer, arguments.each),
        "mtp_greedy": acceptance,
        "routing_skew": {name: routing_skew(model, rows) for name, rows in skewed.items()},
        "samples": written,
    }
    arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for task, score in result["exact_match"].items():
        print(f"{task:22s} {score['score']:.2f}  tokens {score['token_accuracy']:.2f}  ({score['num']})")
    print({name: {k: round(v, 3) for k, v in values.items()} for name, values in result["loss"].items()}, acceptance)
    for sample in written:
        print(f"--- {sample['prompt']}\n{sample['answer']}")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
