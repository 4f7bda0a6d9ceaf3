"""llama.cpp's own converter, for a tokenizer that it has not seen.

It knows the pre-tokenizers of published models by a hash of what their tokenizers answer, and refuses others. Ours are
byte-level BPE with the splitting of GPT-2. Run by drive_llamacpp.py, with llama.cpp's sources on the path.
"""

from __future__ import annotations

import convert_hf_to_gguf
from conversion.base import TextModel

known = TextModel.get_vocab_base_pre


def get_vocab_base_pre(self, tokenizer) -> str:
    try:
        return known(self, tokenizer)
    except NotImplementedError:                # raised by llama.cpp for a tokenizer that it does not know
        return "gpt-2"


if __name__ == "__main__":
    TextModel.get_vocab_base_pre = get_vocab_base_pre
    convert_hf_to_gguf.main()
