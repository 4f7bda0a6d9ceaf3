"""`tripool chat`: talk to a server. Thoughts are shown dimmed; `/reset` forgets the conversation, `/quit` ends."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from tripool.cli.client import Client, parse_server
from tripool.cli.flags import DEFAULT_URL, ApiKey, Url
from tripool.cli.screen import err, out
from tripool.core.errors import RequestError

HELP = "/reset begins anew, /system TEXT sets a system message, /stats shows or hides figures, /quit ends"


@dataclass
class Answer:
    """One reply, as it came."""

    content: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    asked_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0

    @property
    def figures(self) -> str:
        """One line: counts and times."""
        if self.first_s is None:
            return "no output"
        tokens = self.usage.get("completion_tokens", 0)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        words = [f"{self.usage.get('prompt_tokens', 0)} prompt tokens" + (f" ({cached} cached)" if cached else ""),
                 f"{tokens} tokens", f"first after {(self.first_s - self.asked_s) * 1e3:.0f} ms"]
        if tokens > 1:
            words.append(f"then {(self.last_s - self.first_s) / (tokens - 1) * 1e3:.1f} ms each")
        return ", ".join(words)


class Conversation:
    """Messages so far, and how to ask for the next."""

    def __init__(self, client: Client, model: str, settings: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._settings = settings
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        self.messages = [each for each in self.messages[:1] if each["role"] == "system"]

    def set_system(self, text: str) -> None:
        spoken = [each for each in self.messages if each["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *spoken]

    async def say(self, text: str) -> Answer:
        """Send a message and show the answer as it comes. A failed exchange leaves the conversation as it was.

        Raises:
            RequestError: the server refused, or the answer broke off.
        """
        answer = Answer(asked_s=time.perf_counter())
        asked = {"role": "user", "content": text}

        def take(event: dict[str, Any], now: float) -> None:
            for choice in event.get("choices", []):
                delta = choice.get("delta") or {}
                thought, content = delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content")
                answer.finish = choice.get("finish_reason") or answer.finish
                if thought or content:
                    answer.first_s, answer.last_s = answer.first_s or now, now
                if thought:
                    answer.reasoning += thought
                    out.print(thought, end="", style="dim", markup=False)
                if content:
                    if answer.reasoning and not answer.content:
                        out.print()
                    answer.content += content
                    out.print(content, end="", markup=False)

        body = {"model": self._model, "messages": [*self.messages, asked], **self._settings}
        try:
            answer.usage = await self._client.follow("/v1/chat/completions", body, take)
        finally:
            if answer.first_s is not None:
                out.print()
        self.messages += [asked, {"role": "assistant", "content": answer.content}]
        return answer


def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    model: Annotated[str, typer.Option(help="The model; without it, the one that is served.")] = "",
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.",
                                                      show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.", show_default=False)] = None,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Ask for thoughts, where the model "
                                                  "has them.", show_default=False)] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Show counts and times after each answer.")] = True,
) -> None:
    """Talk to a server in the terminal. Any OpenAI-compatible one will do.

        tripool chat
        tripool chat --url http://10.0.0.5:8000 --temperature 0
        echo "What is 7 + 5?" | tripool chat
    """
    settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    settings = {name: value for name, value in settings.items() if value is not None}
    if thinking is not None:
        settings["chat_template_kwargs"] = {"thinking": thinking, "enable_thinking": thinking}
    try:
        asyncio.run(_begin(url, api_key, model, system, settings, stats))
    except ConnectionError as error:
        raise RequestError(f"the connection to {url} was lost: {error}", status=502) from error


async def _begin(url: str, key: str, model: str, system: str, settings: dict[str, Any], stats: bool) -> None:
    async with Client(parse_server(url, key)) as client:
        conversation = Conversation(client, model or await served_model(client), settings)
        if system:
            conversation.set_system(system)
        await talk(conversation, stats)


async def talk(conversation: Conversation, stats: bool) -> None:
    """Read lines and answer them until the end of input or `/quit`."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        err.print(HELP, style="dim", markup=False)
    while (line := await asyncio.to_thread(_read_line, at_terminal)) is not None:
        command, _, rest = line.partition(" ")
        match command:
            case "":
                continue
            case "/quit" | "/exit":
                break
            case "/reset":
                conversation.reset()
            case "/system":
                conversation.set_system(rest)
            case "/stats":
                stats = not stats
            case "/help":
                err.print(HELP, style="dim", markup=False)
            case _:
                try:
                    answer = await conversation.say(line)
                except RequestError as error:
                    if not at_terminal:
                        raise
                    err.print(str(error), style="red", markup=False)
                    continue
                if stats:
                    err.print(answer.figures, style="dim", markup=False)


def _read_line(at_terminal: bool) -> str | None:
    """The next line; None at the end. Without a terminal no prompt is shown."""
    try:
        return input("> " if at_terminal else "").strip()
    except EOFError:
        return None


async def served_model(client: Client) -> str:
    """The name of the first model that the server has."""
    models = (await client.get("/v1/models"))["data"]
    if not models:
        raise RequestError("the server has no model", status=404)
    return str(models[0]["id"])
