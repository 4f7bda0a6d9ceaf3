"""The tokenizer: byte-level BPE of 4096 pieces over the training mix, every digit on its own.

Special tokens take ids 0-15. As in the published tokenizer, encoding a plain text puts the start marker before it,
and a rendered chat, which holds its own, is encoded with `add_special_tokens=False`.

    python -m recipes.tiny.tokenizer --novels recipes/tiny/out/novels.txt --out recipes/tiny/out/tokenizer.json
"""

import argparse
import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from recipes.tiny import chat
from recipes.tiny.text.documents import documents

VOCAB_SIZE = 4096
TRAINING_SEED = 1
NUM_DOCUMENTS = 40_000
NOVEL_CHARACTERS = 2_000_000
_ORDINARY = ("<think>", "</think>")


def plain(text: str) -> str:
    """The text without special tokens, which the pieces are not learned from."""
    for token in chat.SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    return text


def with_ordinary(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the thinking marks as ordinary text; the trainer makes all its given tokens special."""
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = token["content"] not in _ORDINARY
    return Tokenizer.from_str(json.dumps(described, ensure_ascii=False))


def train(novels: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in chat.SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    generated = (plain(d.text) for d in itertools.islice(documents(TRAINING_SEED), NUM_DOCUMENTS))
    tokenizer.train_from_iterator(itertools.chain(generated, novels[:NOVEL_CHARACTERS].split("\n")), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{chat.BOS} $A", pair=f"{chat.BOS} $A $B", special_tokens=[(chat.BOS, 0)]
    )
    tokenizer = with_ordinary(tokenizer)
    assert [tokenizer.token_to_id(t) for t in chat.SPECIAL_TOKENS] == list(range(16)), "special tokens moved"
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = train(arguments.novels.read_text(encoding="utf-8"))
    tokenizer.save(str(arguments.out))
    print(f"{tokenizer.get_vocab_size()} pieces")


if __name__ == "__main__":
    main()
