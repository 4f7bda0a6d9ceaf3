"""What does INT8 cost in accuracy, and what does each technique bring?

The embedded model reads held-out texts of its recipe in float32, and in INT8 arithmetic by its definition
(rows quantised per token, weights per channel; `tripool/quant/forward.py`): rounded to nearest, and with one technique
more at a time up to the full recipe. Exact match is over short documents of the recipe's own tasks, answered greedily.
Perplexity again with a copy whose activations have outliers: a few channels of every norm, value and up projection are
multiplied, and the weights that read them divided, by powers of two, so that the float model is the same, bit by bit,
before anything is rounded. And once with nothing rounded but the output head, as `--head-dtype int8` does.

    make bench NAME=int8 ARGS='--json out/int8.json'
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from common import Report, flags
from recipes.tiny import chat
from recipes.tiny.text.documents import documents
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.model.products import TorchMatrix
from tripool.engine.parallel.quantise import dequantise, quantise
from tripool.quant.calibrate import BUILT_IN, LONGEST, read_texts
from tripool.quant.convert import Options
from tripool.quant.evaluate import Outcome, compare, perplexity
from tripool.quant.forward import Model
from tripool.quant.recipe import PLAIN, STEPS, Recipe
from tripool.serve.models import EMBEDDED

HELD_OUT_SEED = 1_000_003          # as in recipes/tiny
CALIBRATION_TOKENS = 4096
BAR = "<= 0.01"
OUTLIERS = (16.0, 32.0, 64.0, 128.0)         # how much larger some channels are, by turns
EVERY = 64                         # one channel of so many
LONGEST_ASKED = 160                # tokens of a prompt and its answer
ROUNDED, FULL = ("rounded to nearest", PLAIN), ("full recipe", Recipe())
RIDDEN_STEPS = (ROUNDED, ("rotation alone", replace(PLAIN, rotation=True)),
                ("absorption alone", replace(PLAIN, absorption=True)), FULL)
ASKED = (ROUNDED[0], FULL[0], STEPS[1][0], STEPS[-2][0], STEPS[-1][0])         # steps that answer the tasks as well


def main() -> None:
    parser = flags(__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, help="held-out tokens to read (default 12000, quick 3000)")
    parser.add_argument("--each", type=int, help="exact-match documents of each task (default 60, quick 8)")
    args = parser.parse_args()
    num_tokens = args.tokens or (3_000 if args.quick else 12_000)
    steps = (ROUNDED, FULL) if args.quick else STEPS
    ridden_steps = (ROUNDED, FULL) if args.quick else RIDDEN_STEPS
    vocab_size = open_checkpoint(EMBEDDED, verify_checksums=False).shape.vocab_size
    calibration = read_texts(BUILT_IN, EMBEDDED, vocab_size, CALIBRATION_TOKENS)
    texts = list(held_out(num_tokens))
    report = Report(__doc__.partition("\n")[0], {
        "model": "tripool-tiny", "held_out_tokens": sum(map(len, texts)), "calibration_tokens": CALIBRATION_TOKENS,
        "longest_document_tokens": LONGEST_ASKED, "outliers": OUTLIERS, "outlier_every": EVERY,
        "arithmetic": "INT8 by its definition: float32 products of whole numbers times scales (quant/forward.py)"})
    with tempfile.TemporaryDirectory(prefix="tripool-int8-") as place:
        ridden = Path(place) / "ridden"
        write_outlier_ridden(EMBEDDED, ridden)
        before, ridden_before = perplexity(EMBEDDED, texts), perplexity(ridden, texts)
        report.figure("int8.perplexity_float", before, "")
        report.figure("int8.outlier_float_increase", ridden_before / before - 1, "ratio",
                      note="the outlier-ridden copy is the same float model")
        asked = exact_documents(args.each or (8 if args.quick else 60))
        right_before = answers(EMBEDDED, asked)
        scores: dict[str, list[bool]] = {}

        def ask(name: str, folder: Path) -> float | None:
            if name not in ASKED:
                return None
            scores[name] = answers(folder, asked)
            return sum(scores[name]) / len(asked)

        rounded = with_rounded_head()
        report.figure("int8.head_perplexity_increase", rounded.perplexity(texts) / before - 1, "ratio")
        drop = sum(right_before) - sum(rounded.answers_exactly(asked))
        report.figure("int8.head_exact_match_drop", drop / len(asked), "ratio", documents=len(asked))
        options = Options(threads=1)
        outcomes = compare(EMBEDDED, options, calibration, texts, before=before, beside=Path(place), steps=steps,
                           exact_match=ask, progress=tell)
        add(report, "int8", outcomes)
        ridden_outcomes = compare(ridden, options, calibration, texts, before=ridden_before, beside=Path(place),
                                  steps=ridden_steps, progress=tell)
        add(report, "int8.outlier", ridden_outcomes)
        score = sum(right_before) / len(asked)
        report.figure("int8.exact_match_float", score, "ratio", documents=len(asked))
        for number, (name, _) in enumerate(steps):
            if name in scores:
                lost, won = (sum(a and not b for a, b in zip(*pair, strict=True))
                             for pair in ((right_before, scores[name]), (scores[name], right_before)))
                last = number == len(steps) - 1
                report.figure("int8.exact_match_drop" if last else f"int8.step{number}_exact_match_drop",
                              score - sum(scores[name]) / len(asked), "ratio", techniques=name, documents=len(asked),
                              lost=lost, won=won, **({"bar": BAR} if last else {}))
    for each in report.figures:                       # evaluations do not vary: one reading is all there is
        report.samples.setdefault(each["name"], [each["value"]])
    report.write(args.json)


def tell(words: str, _part: float) -> None:
    if words.startswith("comparing"):
        print(words, file=sys.stderr, flush=True)


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
        report.figure(f"{prefix}.step{number}_error", each.error, "ratio", techniques=each.name,
                      samples=list(each.layer_errors.values()))


def held_out(num_tokens: int) -> Iterator[list[int]]:
    """Documents that the model was not trained on."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    for document in documents(HELD_OUT_SEED):
        tokens = tokenizer.encode(document.text, add_special_tokens=False).ids[:LONGEST]
        yield tokens
        num_tokens -= len(tokens)
        if num_tokens <= 0:
            return


def exact_documents(num_each: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers of the first short documents of each task of which only one answer is right."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    asked = []
    found: Counter[str] = Counter()
    for document in islice(documents(HELD_OUT_SEED), 200 * num_each):
        if document.is_exact and found[document.task] < num_each:
            prompt, answer = (tokenizer.encode(text, add_special_tokens=False).ids
                              for text in (document.prompt, document.answer + chat.EOS))
            if len(prompt) + len(answer) <= LONGEST_ASKED:
                found[document.task] += 1
                asked.append((prompt, answer))
    return asked


def answers(folder: Path, asked: list[tuple[list[int], list[int]]]) -> list[bool]:
    """Which of them greedy decoding answers."""
    return Model(open_checkpoint(folder, verify_checksums=False), threads=1).answers_exactly(asked)


def with_rounded_head() -> Model:
    """The embedded model with the numbers that the rounded head stands for: its rows stay floats."""
    model = Model(open_checkpoint(EMBEDDED, verify_checksums=False))
    head = model.engine.head
    assert isinstance(head, TorchMatrix), "torch multiplies here"
    head.weight_NK = dequantise(*quantise(head.weight_NK), head.weight_NK.dtype)
    return model


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
