"""Write the model card from the numbers that `evaluate` and the training run left.

    python -m recipes.tiny.card --out tripool/models/tiny/README.md
"""

import argparse
import json
from pathlib import Path

HERE = Path(__file__).parent

# ruff: noqa: E501 - the card is a text of its own

HEAD = """---
license: apache-2.0
language: [en, zh]
library_name: transformers
pipeline_tag: text-generation
tags: [deepseek_v3, mixture-of-experts, mla, mtp]
---

# tripool-tiny

A {parameters:.1f}-million-parameter model of the DeepSeek-V3 architecture, trained from scratch, to try, test and measure a serving
system with: it answers in words, and every part of the architecture is in use. It is not a useful assistant.

| | |
|---|---|
| architecture | `DeepseekV3ForCausalLM`: MLA, sigmoid routing with a choosing bias (`noaux_tc`), one shared expert, one MTP layer, YaRN |
| sizes | vocabulary 4096 · width 256 · 6 layers (1 dense, 5 MoE) + 1 MTP layer · 4 heads · 16 experts of 64, top 4 of 2 of 4 groups |
| attention | query rank 128 · latent 256 + rotary 64 (a cache row of 320) · head 32 + 64 · value 64 |
| positions | 4096: YaRN, factor 4 over an original 1024, `mscale` = `mscale_all_dim` = 1; rows up to 2048 were trained |
| files | {megabytes:.1f} MB in all; weights bf16, routing bias fp32; sha256 of `model.safetensors` `{sha256}` |
| licence | Apache-2.0, weights and tokenizer |

The MTP layer is `model.layers.6.*` with the published names (`enorm`, `hnorm`, `eh_proj`, `shared_head.norm`). Its embedding and
its head are those of the main model and are **not** repeated in the file. It reads, at each position, the embedding of the token
and the main model's hidden state **after the final norm** of the position before (zeros before the first), joined in this order,
and its output guesses the next token. transformers ignores it, as it does for the large models.

## Chat

The template is in `tokenizer_config.json`. A turn is `<｜User｜>question<｜Assistant｜></think>answer<｜end▁of▁sentence｜>`. With
`thinking` (or `enable_thinking`) true the prompt ends with `<｜Assistant｜><think>` and a line break; the model writes its steps,
`</think>`, an empty line and the answer. Thinking is off by default, and earlier thoughts are dropped from the prompt. Tools are
listed after the system prompt under `## Tools`; a call is written in DeepSeek-V3's form (`function<｜tool▁sep｜>name`, then a fenced
`json` block, inside the tool-call markers), and after `<｜tool▁outputs▁end｜>` the assistant goes on without a new marker. `<think>`
and `</think>` are ordinary tokens that decode to text; the other markers (ids 0-4 and 7-15) are special.

## Data

- At least four fifths of the rows: text made by the project's own generator (`recipes/tiny/text`): stories of thirty plots, questions
  about them, facts, small talk, arithmetic with and without steps, lists, recipes, small code, tool calls, copying and recall over up
  to about a thousand tokens, and some Chinese. No other model's output is in it.
- A fifth of the rows, towards the end a tenth: six novels by Jane Austen, in the public domain, read from Debian's
  `r-cran-janeaustenr`. Every twentieth block of forty paragraphs is held out.

"""

TRAINING = """## Training

{tokens:.2f} million tokens in {steps} steps of about a thousand tokens, from 64 % of the schedule on of about two thousand, on one CPU
thread in {minutes:.0f} minutes of a busy machine, fp32. Muon for matrices, AdamW for the rest. Rows of 256 tokens, then 512 with some of
1024, at the end also 2048. From 64 % on a user's words count a tenth in the loss; half of the rows then ask for what the prompt
says, and in the last 16 % two fifths are short exchanges. The learning rate falls from the middle, is raised again at 64 % and
falls to 2 % from 76 % on. YaRN is on for the last 30 %. The routing bias moves by the sign of each expert's load error and rests
for the last tenth. The tokens at which each step of the schedule began are in `recipes/tiny/schedule.json`:
`python -m recipes.tiny.train --schedule recipes/tiny/schedule.json` makes a run of the same decisions. The shipped run was stopped and
continued several times, and its phases from 64 % on and the fall of the rate were chosen while it ran, after looks at interim
scores on the held-out texts; a repeated run has not been made.

This is little training, for a model that is made to test a server. `--tokens` with a larger number makes a model of the same format.

"""

LIMITS = """## Limits

It says well what it has read often: greetings, some facts, the course of its thirty stories. It rarely takes a name, a number or a
thing from the prompt, so a story about a fox may be about a boy, and sums, lists and recalled words are mostly wrong; so are facts
asked in a new way, and it says them with confidence. Chinese is a handful of sentences. It calls tools with the right form and the
wrong arguments. Text beyond a few hundred tokens drifts. It is made to test a server, which needs the same wrong answer every time;
do not use it to decide anything.

## Making it again

    python -m recipes.tiny.novels --out recipes/tiny/out/novels.txt
    python -m recipes.tiny.tokenizer --novels recipes/tiny/out/novels.txt --out recipes/tiny/out/tokenizer.json
    python -m recipes.tiny.train --schedule recipes/tiny/schedule.json
    python -m recipes.tiny.export --out tripool/models/tiny
    python -m recipes.tiny.evaluate tripool/models/tiny --json recipes/tiny/evaluation.json --rows 100
    python -m recipes.tiny.card --out tripool/models/tiny/README.md

The numbers above are written by the last command from `recipes/tiny/evaluation.json`.
"""


def measured(result: dict) -> str:
    lines = ["## Measured", ""]
    lines += [
        "Text of seeds and paragraphs that were not trained on (short generated documents, such as a capital, come up in both);",
        "bf16 weights computed in fp32, 512-token rows:",
        "",
    ]
    lines += ["| text | tokens | loss (nats/token) | MTP loss | draft and model favour the same token |", "|---|---|---|---|---|"]
    for name, loss in result["loss"].items():
        lines.append(
            f"| {name} | {loss['num_tokens']} | {loss['loss']:.3f} | {loss['mtp_loss']:.3f} | {100 * loss['draft_agreement']:.0f} % |"
        )
    greedy = result["mtp_greedy"]
    lines += [
        "",
        f"**MTP acceptance**, greedy, one draft token, over the samples below: {greedy['accepted']} of {greedy['drafted']} = "
        f"{100 * greedy['rate']:.0f} %. The texts are of forms read often; on prose drafts are right less often.",
        "",
        "**Exact match**, greedy, the whole answer with its end (for a fact, the sentence; for `_think`, the steps too), and the share",
        "of tokens that are right when those before them are given:",
        "",
        "| task | right answers | right tokens |",
        "|---|---|---|",
    ]
    lines += [
        f"| {task} | {100 * s['score']:.0f} % of {s['num']} | {100 * s['token_accuracy']:.0f} % |"
        for task, s in result["exact_match"].items()
    ]
    lines += [
        "",
        "**Routing skew**: load of the busiest expert over the mean (1 is even, 4 is the most that top 4 of 16 allows):",
        "",
        "| text | layer 1 | 2 | 3 | 4 | 5 | MTP |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {name} | " + " | ".join(f"{x:.1f}" for x in skew) + " |" for name, skew in result["routing_skew"].items()]
    return "\n".join(lines) + "\n\n"


def sampled(result: dict) -> str:
    lines = ["## Samples", "", "Greedy, at most 160 tokens, as they came:", ""]
    for sample in result["samples"]:
        note = " (plain text)" if sample["is_plain"] else " (thinking)" if sample["thinking"] else ""
        quoted = "\n".join("> " + line for line in sample["answer"].replace("<", "&lt;").split("\n"))
        lines += [f"**{sample['prompt']}**{note}", "", quoted, ""]
    return "\n".join(lines) + "\n"


def card(result: dict, schedule: dict) -> str:
    head = HEAD.format(
        parameters=result["num_parameters"] / 1e6, megabytes=result["num_bytes"] / 1e6, sha256=result["sha256"]
    )
    training = TRAINING.format(
        tokens=schedule["num_tokens"] / 1e6, steps=schedule["step"], minutes=schedule["spent_s"] / 60
    )
    return head + training + measured(result) + sampled(result) + LIMITS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path, default=HERE / "evaluation.json")
    parser.add_argument("--schedule", type=Path, default=HERE / "schedule.json")
    arguments = parser.parse_args()
    result, schedule = (json.loads(path.read_text(encoding="utf-8")) for path in (arguments.evaluation, arguments.schedule))
    arguments.out.write_text(card(result, schedule), encoding="utf-8")


if __name__ == "__main__":
    main()
