"""Text to token ids and back, without loading a tensor library.

The tokens of a byte-level vocabulary are byte strings, so text is recovered by joining bytes. A table of
each token's bytes, and of its text where the bytes are whole characters, makes a streamed token cost one
look-up; what is split between tokens waits in an incremental UTF-8 decoder. Other vocabularies take a
slower way that asks the tokenizer about a window of tokens. Either way the pieces join to the text that
decoding everything at once gives: never half a character, never one lost.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from tripool.core.errors import CheckpointError

LOST = "\ufffd"
"""Stands for bytes that are no character."""


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, one at a time."""

    def step(self, token_id: int) -> str:
        """The text that has become certain with this token; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What an incomplete character at the end becomes."""
        ...


class Tokenizer:
    """A model's vocabulary."""

    def __init__(self, inner: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> None:
        self.inner = inner
        self.config = config or {}
        self.special_tokens = {
            name: token for name, value in self.config.items()
            if name.endswith("_token") and (token := _token_text(value)) is not None
        }
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._adds_bos = bool(self.config.get("add_bos_token")) and self.bos_token_id is not None
        self._table = _ByteTable(inner) if _is_byte_level(inner) else None
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        # An upper bound of the bytes in one token bounds the tokens of a long text from below, before it is encoded.
        swallows = inner.normalizer is not None or any(
            added.lstrip or added.rstrip for added in inner.get_added_tokens_decoder().values())
        self._longest_token_bytes = self._table.longest if self._table and not swallows else None

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.inner.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. A rendered chat template brings its special tokens along and adds none."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._adds_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            return [self.bos_token_id, *ids]
        return ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, found without encoding it."""
        if self._longest_token_bytes is None:
            return 0
        return -(-len(text) // self._longest_token_bytes)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.step(each) for each in token_ids]) + detokenizer.flush()

    def detokenizer(self, *, skip_special_tokens: bool, keep: Sequence[str] = ()) -> Detokenizer:
        """A fresh one for one sequence. Tokens spelled as in `keep` are shown even where special ones are skipped."""
        if self._table is not None:
            return _ByteDetokenizer(self._table, skip_special_tokens, keep)
        return _WindowDetokenizer(self.inner, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, special ones included."""
        if self._table is not None:
            return self._table.bytes_of(token_id)
        return self.inner.decode([token_id], skip_special_tokens=False).encode()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json` and, where there is one, `tokenizer_config.json`.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            str(folder), ["tokenizer.json is missing; pass --tokenizer FOLDER to take it from elsewhere"]
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:   # the library raises plain Exception
        raise CheckpointError(str(folder), [f"tokenizer.json cannot be read: {error}"]) from error
    inner.no_truncation()
    inner.no_padding()
    return Tokenizer(inner, read_json(folder / "tokenizer_config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(str(path.parent), [f"{path.name} is not valid JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path.parent), [f"{path.name} holds no JSON object"])
    return value


def _token_text(value: Any) -> str | None:
    """Configuration files spell a special token as text or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


# ---------------------------------------------------------------- byte-level vocabularies


def _is_byte_level(inner: tokenizers.Tokenizer) -> bool:
    decoder = json.loads(inner.to_str()).get("decoder") or {}
    return bool(decoder.get("type") == "ByteLevel")


def _byte_of_char() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable ones as themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(rest)}


class _ByteTable:
    """The bytes of every token, and its text where they are whole characters."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        alphabet = _byte_of_char()
        vocab = inner.get_vocab(with_added_tokens=True)
        size = max(vocab.values(), default=-1) + 1
        self.data: list[bytes] = [b""] * size
        self.text: list[str | None] = [""] * size
        for token, token_id in vocab.items():
            spelled = [alphabet.get(char) for char in token]
            # An added token with other characters stands for itself.
            data = token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
            self.data[token_id] = data
            self.text[token_id] = _whole(data)
        self.special = {token_id for token_id, added in inner.get_added_tokens_decoder().items() if added.special}
        self.id_of = vocab
        self.longest = max(map(len, self.data), default=1) or 1

    def bytes_of(self, token_id: int) -> bytes:
        return self.data[token_id] if 0 <= token_id < len(self.data) else b""


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class _ByteDetokenizer:
    """Joins bytes. A model's vocabulary may be padded beyond the tokenizer's: such ids have no text."""

    __slots__ = ("_data", "_decoder", "_hidden", "_size", "_text", "_waiting")

    def __init__(self, table: _ByteTable, skip_special_tokens: bool, keep: Sequence[str]) -> None:
        self._data, self._text, self._size = table.data, table.text, len(table.data)
        shown = {table.id_of.get(token) for token in keep}
        self._hidden = table.special - shown if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = False      # whether the decoder holds the beginning of a character

    def step(self, token_id: int) -> str:
        if token_id in self._hidden or not 0 <= token_id < self._size:
            return ""
        if not self._waiting:
            text = self._text[token_id]
            if text is not None:
                return text
        text = self._decoder.decode(self._data[token_id])
        self._waiting = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._waiting = False
        return self._decoder.decode(b"", True)


# ---------------------------------------------------------------- all other vocabularies


class _WindowDetokenizer:
    """Asks the tokenizer about the last tokens, with a few before them, as text may depend on what is to the left."""

    def __init__(self, inner: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._inner = inner
        self._skip = skip_special_tokens
        self._window: list[int] = []   # tokens whose text is out, then those whose text is not
        self._num_out = 0

    def step(self, token_id: int) -> str:
        if self._inner.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        before = self._decode(self._window[:self._num_out])
        text = self._decode(self._window)
        if text.endswith(LOST) or len(text) <= len(before):
            return ""
        self._window = self._window[self._num_out:]
        self._num_out = len(self._window)
        return text[len(before):]

    def flush(self) -> str:
        before = self._decode(self._window[:self._num_out])
        text = self._decode(self._window)
        self._num_out = len(self._window)
        return text[len(before):]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._inner.decode(token_ids, skip_special_tokens=self._skip)) if token_ids else ""
