"""What does INT8 cost in accuracy, and what does each technique bring?

The embedded model reads held-out texts of its recipe in float32, and in INT8 arithmetic by its definition (rows
quantised per token, weights per channel): rounded to nearest, and by the full recipe with one technique more at a time.
The same with a copy whose activations have outliers: a few channels of every norm, value and up projection are
multiplied, and the weights that read them divided, by powers of two, so that the float model is the same, bit by bit,
before anything is rounded.

    make bench NAME=int8 ARGS='--json out/int8.json'
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from common import Report, flags
from recipes.tiny import chat
from recipes.tiny.text.documents import Document, documents
from tripool.engine.checkpoint import open_checkpoint
from tripool.quant.calibrate import BUILT_IN, LONGEST, read_texts
from tripool.quant.convert import Options, convert
from tripool.quant.evaluate import Outcome, compare, perplexity
from tripool.quant.forward import Model
from tripool.quant.recipe import PLAIN, STEPS, Recipe
from tripool.serve.models import EMBEDDED

HELD_OUT_SEED = 1_000_003          # as in recipes/tiny
CALIBRATION_TOKENS = 4096
BAR = "<= 0.01"
OUTLIERS = (16.0, 32.0, 64.0, 128.0)         # how much larger some channels are, by turns
EVERY = 64                         # one channel of so many


def main() -> None:
    parser = flags(__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, help="held-out tokens to read (default 40000, quick 8000)")
    parser.add_argument("--each", type=int, help="exact-match documents of each task (default 20, quick 2)")
    args = parser.parse_args()
    num_tokens = args.tokens or (8_000 if args.quick else 40_000)
    steps = (("rounded to nearest", PLAIN), ("full recipe", Recipe())) if args.quick else STEPS
    vocab_size = open_checkpoint(EMBEDDED, verify_checksums=False).shape.vocab_size
    calibration = read_texts(BUILT_IN, EMBEDDED, vocab_size, CALIBRATION_TOKENS)
    texts = list(held_out(num_tokens))
    report = Report(__doc__.partition("\n")[0], {
        "model": "tripool-tiny", "held_out_tokens": sum(map(len, texts)), "calibration_tokens": CALIBRATION_TOKENS,
        "outliers": OUTLIERS, "outlier_every": EVERY})
    with tempfile.TemporaryDirectory(prefix="tripool-int8-") as place:
        ridden = Path(place) / "ridden"
        write_outlier_ridden(EMBEDDED, ridden)
        before, ridden_before = perplexity(EMBEDDED, texts), perplexity(ridden, texts)
        report.figure("int8.perplexity_float", before, "")
        report.figure("int8.outlier_float_increase", ridden_before / before - 1, "ratio",
                      note="the outlier-ridden copy is the same float model")
        for prefix, folder in (("int8", EMBEDDED), ("int8.outlier", ridden)):
            outcomes = compare(folder, Options(), calibration, texts, beside=Path(place), steps=steps)
            add(report, prefix, outcomes)
        convert(EMBEDDED, Path(place) / "full", texts=calibration)
        documents_asked = list(exact_documents(args.each or (2 if args.quick else 20)))
        score, int8_score = (exact_match(each, documents_asked) for each in (EMBEDDED, Path(place) / "full"))
        report.figure("int8.exact_match_float", score, "ratio", documents=len(documents_asked))
        report.figure("int8.exact_match_drop", score - int8_score, "ratio", bar=BAR, documents=len(documents_asked))
    report.write(args.json)


def add(report: Report, prefix: str, outcomes: list[Outcome]) -> None:
    """Figures of one model: the two that have a bar, and each technique's."""
    plain = next(each for each in outcomes if each.recipe == PLAIN)
    full = outcomes[-1]
    if prefix == "int8":
        report.figure("int8.perplexity_increase", full.increase, "ratio", bar=BAR)
        report.figure("int8.rtn_increase", plain.increase, "ratio")
    else:
        report.figure("int8.outlier_rtn_increase", plain.increase, "ratio", bar="> 0.01")
        report.figure("int8.outlier_full_increase", full.increase, "ratio", bar=BAR)
    for number, each in enumerate(outcomes):
        report.figure(f"{prefix}.step{number}_increase", each.increase, "ratio", techniques=each.name)
        report.figure(f"{prefix}.step{number}_error", each.error, "ratio", techniques=each.name)


def held_out(num_tokens: int) -> Iterator[list[int]]:
    """Documents that the model was not trained on."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    for document in documents(HELD_OUT_SEED):
        tokens = tokenizer.encode(document.text, add_special_tokens=False).ids[:LONGEST]
        yield tokens
        num_tokens -= len(tokens)
        if num_tokens <= 0:
            return


def exact_documents(num_each: int) -> Iterator[Document]:
    """The first documents of each task of which only one answer is right."""
    found: Counter[str] = Counter()
    for document in islice(documents(HELD_OUT_SEED), 100 * num_each):
        if document.is_exact and found[document.task] < num_each:
            found[document.task] += 1
            yield document


def exact_match(folder: Path, asked: list[Document]) -> float:
    """The share of documents whose answer greedy decoding gives: every token of it is the likeliest one."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    model = Model(open_checkpoint(folder, verify_checksums=False))
    right = 0
    for document in asked:
        prompt, answer = (tokenizer.encode(text, add_special_tokens=False).ids
                          for text in (document.prompt, document.answer + chat.EOS))
        hidden = model.hidden([prompt + answer])[len(prompt) - 1:-1]
        right += model.logits(hidden).argmax(-1).tolist() == answer
    return right / len(asked)


# --- a model with outliers -------------------------------------------------------------------------------------------


def write_outlier_ridden(source: Path, folder: Path) -> None:
    """A copy of the embedded model whose activations have outliers in a few channels of every product's input."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    config = json.loads((source / "config.json").read_text())
    save_file(with_outliers(load_file(source / "model.safetensors"), config), folder / "model.safetensors",
              metadata={"format": "pt"})


def with_outliers(tensors: Mapping[str, Tensor], config: Mapping[str, int]) -> dict[str, Tensor]:
    """The same model: what makes a channel larger is taken back where the channel is read."""
    ridden = {name: tensor.clone() for name, tensor in tensors.items()}
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]

    def factor(size: int, seed: int) -> Tensor:
        chosen = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:max(1, size // EVERY)]
        factor_ = torch.ones(size)
        factor_[chosen] = torch.tensor(OUTLIERS).repeat(len(chosen))[:len(chosen)]
        return factor_

    def scale(name: str, factor_: Tensor) -> None:
        ridden[name] = (ridden[name].float() * factor_).to(ridden[name].dtype)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention_D = factor(config["hidden_size"], 10 * layer)
        feed_forward_D = factor(config["hidden_size"], 10 * layer + 1)
        query_Q = factor(config["q_lora_rank"], 10 * layer + 2)
        value_HV = factor(heads * config["v_head_dim"], 10 * layer + 3)
        scale(f"{prefix}.input_layernorm.weight", attention_D)
        scale(f"{prefix}.post_attention_layernorm.weight", feed_forward_D)
        scale(f"{prefix}.self_attn.q_a_layernorm.weight", query_Q)
        rows = torch.ones(heads, nope + config["v_head_dim"])
        rows[:, nope:] = value_HV.view(heads, -1)
        scale(f"{prefix}.self_attn.kv_b_proj.weight", rows.view(-1, 1))
        for name in [name for name in ridden if name.startswith(f"{prefix}.")]:
            if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
                scale(name, 1 / attention_D)
            elif name.endswith("q_b_proj.weight"):
                scale(name, 1 / query_Q)
            elif name.endswith("o_proj.weight"):
                scale(name, 1 / value_HV)
            elif name.endswith("mlp.gate.weight"):
                scale(name, 1 / feed_forward_D)
            elif name.endswith(("gate_proj.weight", "up_proj.weight")):
                scale(name, 1 / feed_forward_D)
                if name.endswith("up_proj.weight"):
                    inner_F = factor(ridden[name].shape[0], 10 * layer + 4)
                    scale(name, inner_F.unsqueeze(-1))
                    scale(name.replace("up_proj", "down_proj"), 1 / inner_F)
    return ridden


if __name__ == "__main__":
    main()
