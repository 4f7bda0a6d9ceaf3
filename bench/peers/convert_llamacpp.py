"""llama.cpp's own converter, for tokenizers that it has not seen.

It knows the pre-tokenizers of published models by a hash of what their tokenizers answer, and refuses others. Benches
give token ids and no text, so how text would be split does not matter: it is written down as that of GPT-2, which is
true of the tokenizers of bench/checkpoint.py. Run by drive_llamacpp.py, with llama.cpp's sources on the path.
"""

from __future__ import annotations

import convert_hf_to_gguf
from conversion.base import TextModel

if __name__ == "__main__":
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    convert_hf_to_gguf.main()
