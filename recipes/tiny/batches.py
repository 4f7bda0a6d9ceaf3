"""Training rows: generated documents packed whole, and windows of the novels.

A row starts at the start of a document, so that position zero means what it means when serving. A document too long
for the row at hand waits for a longer one. The stream depends on its seed and on the lengths asked for.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipes.tiny.text.documents import BINDING_MIX, TALK_MIX, Document, documents

HELD_OUT_SEED = 1_000_003     # documents of this seed are for evaluation
_BLOCK = 40                   # paragraphs; every twentieth block is held out
_POOL = 24
BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID = 0, 1, 3, 4


def split_novels(path: Path) -> tuple[list[str], list[str]]:
    """Blocks of paragraphs for training and for evaluation."""
    paragraphs = [p for p in path.read_text(encoding="utf-8").split("\n") if p]
    blocks = ["\n".join(paragraphs[i : i + _BLOCK]) for i in range(0, len(paragraphs), _BLOCK)]
    return [b for i, b in enumerate(blocks) if i % 20 != 19], [b for i, b in enumerate(blocks) if i % 20 == 19]


class Stream:
    """Tokens of generated documents, packed whole into rows."""

    def __init__(self, tokenizer: Tokenizer, made: Iterator[Document]):
        self.tokenizer = tokenizer
        self.documents = made
        self.num_read = 0
        self.pool: list[list[int]] = []

    def skip(self, num_documents: int) -> None:
        for _ in range(num_documents):
            next(self.documents)
        self.num_read += num_documents

    def row(self, length: int) -> list[int]:
        row: list[int] = []
        while len(row) < length:
            while len(self.pool) < _POOL:
                text = next(self.documents).text
                self.num_read += 1
                self.pool.append(self.tokenizer.encode(text, add_special_tokens=False).ids)
            room = length - len(row)
            fitting = next((i for i, d in enumerate(self.pool) if len(d) <= room), None)
            if fitting is None:      # nothing fits: cut a short one, keep the long ones for longer rows
                fitting = min(range(len(self.pool)), key=lambda i: len(self.pool[i]))
            row += self.pool.pop(fitting)[:room]
            waiting = sum(len(d) > length for d in self.pool)
            if waiting > _POOL // 2:  # rows are short for now: let the oldest long document go
                self.pool.pop(next(i for i, d in enumerate(self.pool) if len(d) > length))
        return row


class Batches:
    """Makes batches; `state` and `restore` let a run go on where it stopped."""

    def __init__(self, tokenizer: Tokenizer, novels: list[str], seed: int):
        self.rng = random.Random(seed)
        self.streams = {
            "all": Stream(tokenizer, documents(seed)),
            "talk": Stream(tokenizer, documents(seed + 1_000, TALK_MIX)),
            "binding": Stream(tokenizer, documents(seed + 2_000, BINDING_MIX)),
        }
        self.novel = [i for block in novels for i in tokenizer.encode(block + "\n", add_special_tokens=False).ids]

    def state(self) -> dict:
        streams = {name: (stream.num_read, stream.pool) for name, stream in self.streams.items()}
        return {"streams": streams, "rng": self.rng.getstate()}

    def restore(self, state: dict) -> None:
        for name, (num_read, pool) in state["streams"].items():
            self.streams[name].skip(num_read)
            self.streams[name].pool = list(pool)
        self.rng.setstate(state["rng"])

    def _row(self, length: int, shares: dict[str, float]) -> list[int]:
        name, kind = "all", self.rng.random()
        for candidate, share in shares.items():
            if kind < share:
                name = candidate
                break
            kind -= share
        if name != "novels":
            return self.streams[name].row(length)
        start = self.rng.randrange(len(self.novel) - length)
        return [BOS_ID] + self.novel[start : start + length - 1]

    def next(self, num_rows: int, length: int, shares: dict[str, float]) -> Tensor:
        """Rows of tokens; `shares` of them are novels, talk or binding, and the rest holds all kinds of documents."""
        return torch.tensor([self._row(length, shares) for _ in range(num_rows)])


def is_asked(token_BS: Tensor) -> Tensor:
    """Which tokens belong to a user's turn: after its marker, up to the assistant's."""
    position = torch.arange(token_BS.shape[1])

    def last(*ids: int) -> Tensor:
        return torch.where(torch.isin(token_BS, torch.tensor(ids)), position, -1).cummax(-1).values

    return last(USER_ID) > last(BOS_ID, EOS_ID, ASSISTANT_ID)
