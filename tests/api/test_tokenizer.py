"""Text to ids and back: pieces join to the whole, and no piece has half a character."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tests.api.builders import BOS, EOS, ids, split_ids, token, tokenizer
from tripool.api.tokenizer import LOST, Tokenizer, load_tokenizer
from tripool.core.errors import CheckpointError

any_ids = st.lists(st.integers(0, tokenizer().vocab_size - 1), max_size=40)
texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=40)


@given(any_ids, st.booleans())
def test_a_sequence_decodes_as_the_tokenizers_library_says(token_ids, skip):
    assert tokenizer().decode(token_ids, skip_special_tokens=skip) == \
        tokenizer().inner.decode(token_ids, skip_special_tokens=skip)


@given(texts)
def test_text_comes_back_and_no_piece_has_half_a_character(text):
    for token_ids in (ids(text), split_ids(text)):
        detokenizer = tokenizer().detokenizer(skip_special_tokens=True)
        pieces = [detokenizer.step(each) for each in token_ids]
        assert all(piece in text for piece in pieces)
        assert "".join(pieces) + detokenizer.flush() == text


def test_an_incomplete_character_at_the_end_is_not_lost():
    detokenizer = tokenizer().detokenizer(skip_special_tokens=True)
    assert [detokenizer.step(each) for each in split_ids("a🦊")[:-1]] == ["a", "", "", ""]
    assert detokenizer.flush() == LOST
    assert detokenizer.flush() == ""


def test_special_tokens_are_skipped_unless_kept():
    sequence = [token(BOS), *ids("hi"), token(EOS)]
    assert tokenizer().decode(sequence, skip_special_tokens=True) == "hi"
    assert tokenizer().decode(sequence, skip_special_tokens=False) == f"{BOS}hi{EOS}"
    keeping = tokenizer().detokenizer(skip_special_tokens=True, keep=(EOS,))
    assert "".join(keeping.step(each) for each in sequence) == f"hi{EOS}"


def test_ids_of_a_padded_vocabulary_have_no_text():
    beyond = tokenizer().vocab_size + 3
    assert tokenizer().decode([*ids("a"), beyond, *ids("b")], skip_special_tokens=True) == "ab"
    assert tokenizer().token_bytes(beyond) == b""


def test_the_beginning_of_sequence_is_added_as_the_configuration_says():
    assert tokenizer().encode("a", add_special_tokens=True) == [token(BOS), *ids("a")]
    assert tokenizer().encode(BOS + "a", add_special_tokens=True) == [token(BOS), *ids("a")]
    plain = Tokenizer(tokenizer().inner, {"bos_token": BOS})
    assert plain.encode("a", add_special_tokens=True) == ids("a")


@given(texts)
def test_the_bound_of_a_texts_length_is_never_too_high(text):
    assert tokenizer().least_tokens(text) <= len(ids(text))


def fallback_tokenizer() -> Tokenizer:
    """A vocabulary that spells unknown characters as <0xNN> and words with a leading mark."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {word: 257 + at for at, word in enumerate(["▁hello", "▁world", "▁", "!"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(content=" ", left=1)])
    return Tokenizer(inner)


def test_other_vocabularies_stream_too():
    other = fallback_tokenizer()
    spelled = [257, *(byte + 1 for byte in "🦊".encode()), 258, 260]
    detokenizer = other.detokenizer(skip_special_tokens=True)
    pieces = [detokenizer.step(each) for each in spelled]
    assert pieces == ["hello", "", "", "", "🦊", " world", "!"]
    assert "".join(pieces) == other.inner.decode(spelled)
    broken = other.detokenizer(skip_special_tokens=True)
    assert "".join([broken.step(each) for each in spelled[:3]]) + broken.flush() == other.inner.decode(spelled[:3])


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing.*--tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    tokenizer().inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json holds no JSON object"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    assert load_tokenizer(tmp_path).eos_token_id == token(EOS)
