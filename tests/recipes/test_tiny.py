"""The embedded model and the recipe that makes it."""

from __future__ import annotations

import hashlib
import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from recipes.tiny import chat
from recipes.tiny.batches import Batches, is_asked
from recipes.tiny.evaluate import exact_match, folder_sha256, held_out, right_tokens, rows_of, text_loss
from recipes.tiny.model import Shape, TinyDeepseek, load_published, published_tensors
from recipes.tiny.novels import paragraphs, read_strings
from recipes.tiny.optimizer import make_optimizers, orthogonalise
from recipes.tiny.text import stories, tasks
from recipes.tiny.text.documents import MIX, Document, document, documents
from recipes.tiny.train import NUM_STEPS_OF_PROGRESS, Clock, batch_shape, learning_rate, losses

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tripool" / "models" / "tiny"
RECIPE = ROOT / "recipes" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> TinyDeepseek:
    return load_published(load_file(FOLDER / "model.safetensors"), Shape())


@pytest.fixture(scope="module")
def evaluation() -> dict:
    return json.loads((RECIPE / "evaluation.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- the texts


def test_the_same_seed_gives_the_same_documents_on_every_machine():
    text = "".join(d.text for d in islice(documents(5), 300))
    assert text == "".join(d.text for d in islice(documents(5), 300))
    # A changed digest means that a new training run will not be the one that the card describes.
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GENERATOR_DIGEST


GENERATOR_DIGEST = "48cf3d252a860d88"


@pytest.mark.parametrize("name", list(MIX))
def test_a_document_is_prompt_then_answer_and_leaves_no_template_open(name):
    rng = random.Random(name)
    for _ in range(30):
        made = document(name, rng)
        assert made.text.startswith(chat.BOS)
        assert made.text.endswith(chat.EOS)
        assert made.answer
        assert made.text.count(chat.BOS) == 1
        if not made.task.startswith(("tool", "no_tool", "json", "code")):
            assert not set("{}[]|") & set(made.answer)


@pytest.mark.parametrize("plot", list(stories.PLOTS))
def test_every_plot_fills_every_choice(plot):
    rng = random.Random(0)
    for _ in range(20):
        text, cast = stories.story(rng, plot)
        assert not set("{}[]|") & set(text)
        assert cast["hero"] in text


def test_there_are_thirty_plots():
    assert len(stories.PLOTS) == 30


def test_reasoned_arithmetic_ends_in_the_right_result():
    rng = random.Random(1)
    for _ in range(300):
        task = tasks.arithmetic(rng, reasoned=True)
        a, sign, b = next(
            (int(w[0]), w[1], int(w[2])) for w in zip(*(task.question.replace("?", "").replace(".", "").split()[i:]
                                                        for i in range(3)), strict=False)
            if w[0].isdigit() and w[1] in "+-*" and w[2].isdigit()
        )
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        assert task.answer == f"The answer is {result}."
        assert task.steps.rstrip(".").endswith(str(result))


def test_a_serialised_character_vector_is_read_without_r():
    def string(text: bytes) -> bytes:
        return (0x40009).to_bytes(4, "big") + len(text).to_bytes(4, "big") + text

    lines = [b"It is a truth universally", b"acknowledged.", b"", b"However _little_ known the feelings"]
    data = b"X\n" + (16).to_bytes(4, "big") + len(lines).to_bytes(4, "big") + b"".join(map(string, lines))

    assert paragraphs(read_strings(data)) == [
        "It is a truth universally acknowledged.", "However little known the feelings"]


# ---------------------------------------------------------------- the tokenizer and the template


def test_special_tokens_are_the_first_sixteen_ids(tokenizer):
    assert [tokenizer.token_to_id(token) for token in chat.SPECIAL_TOKENS] == list(range(16))
    assert tokenizer.get_vocab_size() == 4096


def test_text_survives_the_tokenizer(tokenizer):
    for text in ("Once upon a time, 12 + 5 = 17.", "def add(a, b):\n    return a + b\n", "中国的首都是北京。", "é 🙂"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    for made in islice(documents(11), 100):
        ids = tokenizer.encode(made.text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == made.text


def test_every_digit_is_a_token_of_its_own(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2026", add_special_tokens=False).ids] == list("2026")


def test_a_plain_text_gets_the_start_marker(tokenizer):
    assert tokenizer.encode("Hello").ids[0] == 0


def test_thinking_marks_decode_to_text_and_the_others_do_not(tokenizer):
    ids = [tokenizer.token_to_id(t) for t in ("<think>", "</think>", "<｜User｜>", chat.EOS)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think></think>"


USER = {"role": "user", "content": "What is 1 + 2?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [chat.tool_call("add", {"a": 1, "b": 2})]}
ANSWER = {"role": "assistant", "content": "<think>\nOne and two.\n</think>\n\nThree."}


@pytest.mark.parametrize(
    ("messages", "thinking", "expected"),
    [
        ([USER], False, "<｜User｜>What is 1 + 2?<｜Assistant｜></think>"),
        ([USER], True, "<｜User｜>What is 1 + 2?<｜Assistant｜><think>\n"),
        ([{"role": "system", "content": "Be kind."}, USER], False,
         "Be kind.<｜User｜>What is 1 + 2?<｜Assistant｜></think>"),
        ([USER, ANSWER, USER], True,
         f"<｜User｜>What is 1 + 2?<｜Assistant｜></think>Three.{chat.EOS}"
         "<｜User｜>What is 1 + 2?<｜Assistant｜><think>\n"),
        ([USER, CALL, {"role": "tool", "content": "3"}], False,
         f"<｜User｜>What is 1 + 2?<｜Assistant｜></think>{chat.call_text('add', {'a': 1, 'b': 2})}{chat.EOS}"
         "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"),
    ],
    ids=["off", "on", "system", "thoughts are dropped", "tool output"],
)
def test_the_template_renders(messages, thinking, expected):
    assert chat.render(messages, thinking=thinking) == chat.BOS + expected


def test_tools_are_listed_after_the_system_prompt():
    text = chat.render([{"role": "system", "content": "Be kind."}, USER], tools=[tasks.TOOLS["get_time"]])
    assert text.startswith(chat.BOS + "Be kind.\n\n## Tools\n\n### get_time\nDescription: Get the time in a city.\n")
    assert '"required": ["city"]}\n\n<｜User｜>' in text


def test_transformers_renders_what_the_training_texts_hold():
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for messages in ([USER], [USER, ANSWER, USER], [USER, CALL, {"role": "tool", "content": "3"}]):
        for tools in (None, [tasks.TOOLS["add"]]):
            for thinking in (False, True):
                rendered = peer.apply_chat_template(messages, tools=tools, thinking=thinking, tokenize=False,
                                                    add_generation_prompt=True)
                assert rendered == chat.render(messages, tools, thinking)
    assert peer("Hello").input_ids[0] == 0


# ---------------------------------------------------------------- the recipe


SHARES = {"novels": 0.2, "talk": 0.2, "binding": 0.2}


def test_batches_go_on_where_they_stopped(tokenizer):
    novels = ["It is a truth universally acknowledged. " * 100]
    whole = Batches(tokenizer, novels, seed=3)
    first = Batches(tokenizer, novels, seed=3)
    lengths = [(3, 128), (2, 256), (1, 1024), (3, 128)]
    expected = [whole.next(*shape, SHARES) for shape in lengths]
    for shape, rows in zip(lengths[:2], expected[:2], strict=True):
        assert torch.equal(first.next(*shape, SHARES), rows)

    second = Batches(tokenizer, novels, seed=3)
    second.restore(first.state())

    for shape, rows in zip(lengths[2:], expected[2:], strict=True):
        assert torch.equal(second.next(*shape, SHARES), rows)
        assert rows.shape == shape


def test_a_run_under_a_time_budget_can_be_made_again_from_its_schedule():
    timed = Clock(minutes=10, tokens=None, schedule=None)
    rng, num_tokens, seen = random.Random(0), 0, []
    while (progress := timed.tick(rng.uniform(0, 3), num_tokens)) < 1:
        seen.append(progress)
        num_tokens += rng.choice([1024, 2048])

    again, num_tokens, rng = Clock(None, None, timed.began), 0, random.Random(0)
    for progress in seen:
        rng.uniform(0, 3)
        assert again.tick(99.0, num_tokens) == progress
        num_tokens += rng.choice([1024, 2048])


def test_what_a_user_says_is_told_from_what_the_model_answers(tokenizer):
    made = document("arithmetic", random.Random(0))
    ids = tokenizer.encode(made.text * 2, add_special_tokens=False).ids
    asked = is_asked(torch.tensor([ids]))[0].tolist()
    said = tokenizer.decode([i for i, is_user in zip(ids, asked, strict=True) if is_user], skip_special_tokens=False)
    assert said == made.prompt.removeprefix(chat.BOS).split("<｜Assistant｜>")[0] * 2


def test_the_learning_rate_warms_up_stays_and_falls():
    rates = [learning_rate(i / NUM_STEPS_OF_PROGRESS, i * 3) for i in range(NUM_STEPS_OF_PROGRESS + 1)]
    assert rates[0] < 0.1
    assert max(rates) == rates[100] == rates[240] == 1.0
    assert rates[-1] == pytest.approx(0.02)
    assert batch_shape(0.9, 24) == (2, 2048)


SMALL = Shape(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, q_lora_rank=16, kv_lora_rank=16,
              qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, intermediate_size=32, moe_intermediate_size=16,
              num_experts=8, num_picks=2)


@pytest.mark.parametrize("size", [(3, 8, 64), (64, 8), (16, 24)])
def test_muon_steps_make_all_directions_alike(size):
    matrix = torch.randn(size, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    # Jordan's coefficients stop between 0.7 and 1.2
    assert 0.6 < values.min() <= values.max() < 1.3


def test_a_few_steps_lower_both_losses():
    model = TinyDeepseek(SMALL)
    model.initialise(0)
    optimizers = make_optimizers(model)
    rows = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(0))
    seen = []
    for _ in range(15):
        main, mtp = losses(model, rows, mtp_share=0.5, asked_weight=0.1)
        (main + mtp).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append((main.item(), mtp.item()))
    assert seen[-1][0] < seen[0][0] - 0.5
    assert seen[-1][1] < seen[0][1] - 0.5


def test_an_export_is_read_back(tmp_path):
    shape = SMALL
    model = TinyDeepseek(shape)
    model.initialise(0)
    model.use_yarn = True
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()      # what the file keeps
    rows = torch.randint(0, 64, (2, 24))
    before = model.draft_hidden(model.hidden(rows), rows)

    save_file(published_tensors(model), tmp_path / "model.safetensors")
    read = load_published(load_file(tmp_path / "model.safetensors"), shape)

    torch.testing.assert_close(read.draft_hidden(read.hidden(rows), rows), before)


def test_a_draft_does_not_depend_on_later_tokens():
    model = TinyDeepseek(Shape(num_layers=2))
    model.initialise(0)
    rows = torch.randint(0, 4096, (1, 20), generator=torch.Generator().manual_seed(0))
    changed = rows.clone()
    changed[0, 12:] = 7
    with torch.inference_mode():
        one, other = (model.draft_hidden(model.hidden(x), x)[0, :12] for x in (rows, changed))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- the checkpoint


def test_the_checkpoint_is_the_one_that_was_measured(evaluation):
    assert folder_sha256(FOLDER) == evaluation["sha256"]
    assert evaluation["sha256"] in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_folder_is_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 25_000_000


def test_the_checkpoint_holds_the_published_names():
    config = json.loads((FOLDER / "config.json").read_text())
    names = set()
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            names.add(name)
            is_bias = name.endswith("e_score_correction_bias")
            assert file.get_slice(name).get_dtype() == ("F32" if is_bias else "BF16"), name
        assert file.get_slice("model.layers.6.eh_proj.weight").get_shape() == [256, 512]
        assert file.get_slice("model.layers.0.self_attn.kv_a_proj_with_mqa.weight").get_shape() == [320, 256]
    attention = {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    parts = ("gate_proj", "up_proj", "down_proj")
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        stem = f"model.layers.{layer}."
        expected |= {f"{stem}self_attn.{name}.weight" for name in attention}
        expected |= {f"{stem}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
        if layer < config["first_k_dense_replace"]:
            expected |= {f"{stem}mlp.{part}.weight" for part in parts}
            continue
        experts = [f"experts.{i}" for i in range(config["n_routed_experts"])] + ["shared_experts"]
        expected |= {f"{stem}mlp.{expert}.{part}.weight" for expert in experts for part in parts}
        expected |= {f"{stem}mlp.gate.weight", f"{stem}mlp.gate.e_score_correction_bias"}
    expected |= {f"model.layers.6.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
    assert names == expected


def test_transformers_computes_the_same_logits():
    pytest.importorskip("transformers")
    compare = pytest.importorskip("recipes.tiny.parity").compare
    tokens = torch.randint(16, 4096, (1, 300), generator=torch.Generator().manual_seed(0))
    found = compare(FOLDER, tokens)
    assert found["missing_keys"] == found["unexpected_outside_mtp"] == 0
    assert found["logits_max_abs_difference"] < 1e-3    # fp32, different order of sums
    assert found["argmax_agreement"] > 0.99


# Well below what the card states: these say that the weights are the trained ones and are read correctly.
LEAST_RIGHT_TOKENS = {
    "fact": 0.9, "fact_think": 0.85, "code": 0.85, "tool_call": 0.85, "arithmetic": 0.7, "recipe": 0.85,
}  # fmt: skip
LEAST_RIGHT_FACTS = 0.5
MAX_LOSS, MIN_AGREEMENT = 1.1, 0.75


def test_the_model_answers(model, tokenizer):
    scores = exact_match(model, tokenizer, 8)
    low = {task: scores[task] for task, least in LEAST_RIGHT_TOKENS.items() if scores[task]["token_accuracy"] < least}
    assert low == {}
    assert scores["fact"]["score"] >= LEAST_RIGHT_FACTS


def test_it_says_who_it_is(model, tokenizer):
    made = Document("small_talk", chat.render([{"role": "user", "content": "Who are you?"}]),
                    "I am Tripool Tiny, a very small language model.")
    assert right_tokens(model, tokenizer, made).all()


def test_the_model_predicts_generated_text_and_so_does_its_draft(model, tokenizer):
    rows = rows_of((tokenizer.encode(d.text, add_special_tokens=False).ids for d in held_out()), 6)
    found = text_loss(model, rows)
    assert found["loss"] < MAX_LOSS
    assert found["draft_agreement"] > MIN_AGREEMENT
