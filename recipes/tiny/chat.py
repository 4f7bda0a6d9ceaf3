"""The chat format: DeepSeek's markers, one template, and what a trained answer looks like after it.

The prompt of a training document is rendered by the very template that is shipped with the model, so the model has
seen exactly what a server will send. Reasoning is on when the prompt ends with `<think>` and a newline, off when it
ends with `</think>`; earlier reasoning is dropped. After tool outputs the assistant goes on without a new marker.
"""

import json
from functools import cache
from pathlib import Path

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# Ids 0-15, in this order. The two thinking marks are ordinary text to a detokenizer, as in the published tokenizer.
SPECIAL_TOKENS = (
    BOS, EOS, PAD, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_FILE = Path(__file__).parent / "chat_template.jinja"
# The file has a line per statement; the shipped template is one line.
TEMPLATE = _FILE.read_text(encoding="utf-8").replace("-%}\n", "-%}").rstrip("\n")


@cache
def _compiled() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


def render(messages: list[dict], tools: list[dict] | None = None, thinking: bool = False) -> str:
    """The prompt for the next assistant turn."""
    return _compiled().render(
        messages=messages, tools=tools, thinking=thinking, add_generation_prompt=True, bos_token=BOS, eos_token=EOS
    )


def tool_call(name: str, arguments: dict) -> dict:
    """A call in the OpenAI form."""
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def call_text(name: str, arguments: dict) -> str:
    """What the model writes to make one call."""
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
