"""An accelerator computes what the CPU computes, and serves it through the three pools."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.driver import GREEDY, Driver
from tests.engine.model.builders import Row, new_row, random_tokens, relative_error, step
from tests.fleet import TINY, served
from tests.oracle import Oracle
from tripool.core.request import Sampling
from tripool.engine.batch import Batch
from tripool.engine.cache import BlockCache
from tripool.engine.load import load_model
from tripool.engine.model.deepseek import DeepseekModel

DEVICE = "cuda"
BLOCK_TOKENS = 16
# Both sum the same float32 products in another order: after three layers they differ by a few parts in a million.
FLOAT32_TOLERANCE = 1e-4
# A bfloat16 number has 8 bits; a dozen roundings on the way to a logit add up to a part in a hundred. This is of the
# typical logit, not of the worst: a token whose experts are chosen otherwise has other logits altogether.
BFLOAT16_TOLERANCE = 0.05

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available: no GPU, no driver, or a "
                                                             "build of torch without CUDA"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "v3"
    write_checkpoint(path, tiny_config("v3", mtp=1, yarn=True))
    return path


def load(folder, device: str, dtype: str = "float32") -> DeepseekModel:
    return load_model(folder, dtype=dtype, device=device).model


def on_device_of(model: DeepseekModel, batch: Batch) -> Batch:
    moved = {each.name: getattr(batch, each.name).to(model.embed_VD.device) for each in dataclasses.fields(batch)
             if isinstance(getattr(batch, each.name), Tensor)}
    return dataclasses.replace(batch, **moved)


def logits_of(model: DeepseekModel, tokens: list[int]) -> Tensor:
    """Of every token: computed in a long chunk, in a short one behind it, together with another row, one by one."""
    cache = BlockCache(model.shape, 32, BLOCK_TOKENS, model.dtype, device=model.embed_VD.device)
    cache.data.fill_(torch.nan)
    row, other = new_row(tokens), Row(tokens[:20], [30, 31])
    batches = [step([row], [50]), step([row], [3]), step([row, other], [30, 20])]
    batches += [step([row], [1], num_decode_rows=1) for _ in range(len(tokens) - 83)]
    hidden = [model.forward(on_device_of(model, batch), cache)[:batch.count_R[0]] for batch in batches]
    return model.logits(torch.cat(hidden)).cpu()


def test_logits_are_those_of_the_cpu(folder):
    tokens = random_tokens(100, seed=1)
    expected = logits_of(load(folder, "cpu"), tokens)
    assert relative_error(logits_of(load(folder, DEVICE), tokens), expected) < FLOAT32_TOLERANCE


def test_bfloat16_logits_are_close_to_those_of_float32_on_the_cpu(folder):
    tokens = random_tokens(100, seed=1)
    expected = logits_of(load(folder, "cpu"), tokens)
    found = logits_of(load(folder, DEVICE, "bfloat16"), tokens)
    assert float((found - expected).abs().median() / expected.std()) < BFLOAT16_TOLERANCE


def generate(model: DeepseekModel) -> Driver:
    """Rows that join one after another: greedy ones, and ones that use every part of the sampler."""
    driver = Driver(model)
    shaped = Sampling(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2,
                      frequency_penalty=0.1, logit_bias=((7, 3.0),), seed=3, num_logprobs=5, num_prompt_logprobs=2)
    driver.join(0, random_tokens(30, seed=2))
    driver.prefill(0, [13, 17])
    driver.join(1, random_tokens(9, seed=3), sampling=shaped, stops=[11], min_tokens=20)
    driver.join(2, random_tokens(40, seed=4), sampling=GREEDY, stops=[])
    driver.run({1: 9, 2: 25}, grows=driver.grow(driver.last))
    driver.run({2: 15}, grows=driver.grow(driver.last))
    driver.join(3, random_tokens(5, seed=5), sampling=Sampling(seed=4))
    driver.run({3: 5}, grows=driver.grow(driver.last))
    driver.decode(24)
    return driver


def test_the_executor_generates_what_it_generates_on_the_cpu(folder):
    expected, found = generate(load(folder, "cpu")), generate(load(folder, DEVICE))
    assert found.output == expected.output


def test_a_sealed_block_is_in_host_memory_and_comes_back(folder):
    driver = Driver(load(folder, DEVICE))
    driver.join(0, random_tokens(9, seed=6))
    block, other = driver.blocks[0][0], driver.free[-1]
    (sealed, checksum), = driver.run({0: 9}, seals=[block]).sums
    cache = driver.cache
    assert sealed == block
    cache.write_block(other, cache.read_block(block))
    cache.upload([other])
    assert torch.equal(cache.data[other], cache.data[block])
    assert cache.seal_block(other) == checksum


@pytest.mark.timeout(200)
def test_a_chat_is_served_through_three_pools():
    oracle = Oracle(TINY)
    fields = {"device": DEVICE, "dtype": "float32", "max_model_len": 1024}
    with served(prefill=1, decode=1, cache=1, deterministic=False, model_fields=fields) as pools:
        body = {"model": "tripool-tiny", "max_tokens": 16, "temperature": 0,
                "messages": [{"role": "user", "content": "Tell me a story about a small boat."}]}
        chat = pools.http.post("/v1/chat/completions", json=body)
        assert chat.status_code == 200, chat.text
        assert chat.json()["choices"][0]["message"]["content"]
        prompt = random_tokens(150, vocab=4000, seed=40)
        answer = pools.token_ids(prompt, 80)
        oracle.check(prompt, answer)
        pools.wait_for(lambda: pools.reports()["decode-0"]["stored_blocks"] > 0)
        follow_up = [*prompt, *answer, 20, 30]
        oracle.check(follow_up, pools.token_ids(follow_up, 8))
        pools.wait_for(lambda: pools.reports()["prefill-0"]["pool_hit_tokens"] > 0)
        pools.assert_conserved()
