"""Prompts and the oracle, shared by the tests of real deployments."""

import random

import pytest

from tests.fleet import TINY
from tests.oracle import Oracle


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle(TINY)


def make_prompts(count: int, *, seed: int, shortest: int = 1, longest: int = 200) -> list[list[int]]:
    """Prompts of many lengths; half of them begin alike, so that prefixes are shared."""
    rng = random.Random(seed)
    common = [rng.randrange(16, 4000) for _ in range(150)]
    prompts = []
    for i in range(count):
        own = [rng.randrange(16, 4000) for _ in range(rng.randint(shortest, longest))]
        prompts.append(common[:rng.randint(64, 150)] + own[:50] if i % 2 else own)
    return prompts


@pytest.fixture(scope="session")
def prompts():
    return make_prompts
