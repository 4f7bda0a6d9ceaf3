"""`tripool demo`: a small model answers through three pools, and goes on when parts of them are killed.

It starts the processes of a real deployment, asks over HTTP as any client would, and shows what the pools say of
themselves. Inference is deterministic here, so that an answer which survived a failure can be compared token by token
with the one that met none.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from tripool.cli.chat import Conversation, talk
from tripool.cli.client import Client, parse_server
from tripool.cli.flags import read_deployment
from tripool.cli.screen import err, out
from tripool.cli.serve import Stopped, ended_by_signals, wait_ready
from tripool.cli.top import backend_of, compare, look, render
from tripool.core.errors import TripoolError
from tripool.serve.budget import usable_cores
from tripool.serve.launch import Fleet, LaunchOptions, launch
from tripool.serve.process import set_up_logs

QUESTION = "Tell me a story about a fox and a kite."
ANOTHER = "Tell me a story about a bear and a drum."
PASSAGE = (
    "Once upon a time, there was a small town by a slow river. In the town lived a girl named Rose, who had a "
    "red kite that her grandmother had made. Every morning she went to the meadow, and every evening she came "
    "home with leaves in her hair. One windy day the string broke, and the kite flew over the mill, over the "
    "bridge and over the hill, until it was as small as a bird. Rose sat down and cried. An old fox came out "
    "of the bushes and asked her what was wrong. \"My kite is gone,\" said Rose. \"I know the hill,\" said the "
    "fox, \"and I know the tree on the hill where lost kites rest. Come with me, but bring something sweet, for "
    "the owl who lives there does not like to be woken.\" "
)
MAX_TOKENS = 160
KILL_AFTER = 24            # tokens of an answer
JOIN_S = 60.0


@dataclass
class Stream:
    """An answer under way."""

    tokens: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def num_cached(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def demo(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Let me talk to it at the end.")] = True,
) -> None:
    """See a small model answer through three pools.

    Starts one prefill, one decode and one cache process with the embedded model, asks it something, adds an instance
    to two pools while it runs, kills two, and shows that nothing is lost. At the end, in a terminal, it is yours.
    """
    set_up_logs("demo", "error")
    given = {"prefill": 1, "decode": 1, "cache": 1, "port": port, "enable_deterministic_inference": True, "threads": 1}
    deployment = read_deployment(None, given, usable_cores())
    say("Starting one prefill, one decode and one cache process, and a gateway in front of them.")
    with ended_by_signals() as fleets, launch(deployment, LaunchOptions(log_level="error")) as fleet:
        fleets.append(fleet)
        try:
            wait_ready(fleet)
            asyncio.run(_scenes(fleet, chat and sys.stdin.isatty()))
        except Stopped:
            pass


async def _scenes(fleet: Fleet, with_chat: bool) -> None:
    async with Client(parse_server(fleet.url)) as client, watched(fleet):
        before = await look(client)
        model = before.info["model"]
        say(f"{model} is served at {fleet.url}/v1 by {', '.join(fleet.pids)}. A first answer:")
        conversation = Conversation(client, model, {"temperature": 0, "max_tokens": MAX_TOKENS})
        out.print(f"> {QUESTION}", style="bold", markup=False)
        answer = await conversation.say(QUESTION)
        out.print(answer.figures, style="dim", markup=False)

        say("Each pool grows on its own: a second prefill and a second decode instance join.")
        for name in ("prefill", "decode"):
            fleet.start(replace(fleet.processes[f"{name}-0"].spec, member=f"{name}-1"))
        await until_up(client, {"prefill-1", "decode-1"})
        stream = await continue_text(client, PASSAGE)
        out.print(f"A passage of {stream.usage['prompt_tokens']} tokens is read by one prefill instance, and what it "
                  "computed is kept in the cache pool.")

        say("That prefill instance is killed. Another has never seen the passage, but the pool has:")
        kill(fleet, await busiest(client, "prefill", "computed_tokens"))
        stream = await continue_text(client, PASSAGE + "So")
        out.print(f"{stream.num_cached} of {stream.usage['prompt_tokens']} prompt tokens came from the pool.")

        say(f"Now a decode instance is killed after {KILL_AFTER} tokens of an answer:")
        undisturbed = await answer_to(client, ANOTHER)
        out.print(f"> {ANOTHER}", style="bold", markup=False)
        stream = await answer_to(client, ANOTHER, Killer(fleet, client), shown=True)
        same = stream.tokens == undisturbed.tokens
        out.print(f"The stream went on. {len(stream.tokens)} tokens came, counted once, and they are "
                  f"{'the same as without the failure' if same else 'NOT the same as without the failure'}.",
                  style="green" if same else "red")
        if not same:
            raise TripoolError("the answer changed when a decode instance was killed")

        say("What the pools say (`tripool top` shows it live):")
        await until_up(client, {"prefill-0", "prefill-1", "decode-0", "decode-1"})
        out.print(render(compare(before, await look(client))))
        if with_chat:
            say("Yours. /quit ends.")
            conversation.reset()
            await talk(conversation, stats=True)


class Killer:
    """Kills the decode instance that runs a request, once some tokens have come."""

    def __init__(self, fleet: Fleet, client: Client) -> None:
        self._fleet = fleet
        self._client = client
        self._task: asyncio.Task[None] | None = None

    def __call__(self, num_tokens: int) -> None:
        if num_tokens >= KILL_AFTER and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._kill())

    async def _kill(self) -> None:
        kill(self._fleet, await busiest(self._client, "decode", "num_running"))


async def continue_text(client: Client, text: str) -> Stream:
    """A few tokens more of a text."""
    return await follow(client, "/v1/completions", {"prompt": text, "max_tokens": 8, "ignore_eos": True})


async def answer_to(client: Client, question: str, on_tokens: Callable[[int], None] | None = None, *,
                    shown: bool = False) -> Stream:
    """The answer to a question; `on_tokens` is told how many tokens have come."""
    fields = {"messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS}
    return await follow(client, "/v1/chat/completions", fields, on_tokens, shown=shown)


async def follow(client: Client, path: str, fields: dict[str, Any], on_tokens: Callable[[int], None] | None = None, *,
                 shown: bool = False) -> Stream:
    """A greedy answer as a stream.

    Raises:
        RequestError: it was refused, or broke off.
    """
    stream = Stream()

    def take(event: dict[str, Any], now: float) -> None:
        for choice in event.get("choices", []):
            stream.tokens += choice.get("token_ids") or []
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if shown:
                out.print(text, end="", markup=False)
        if on_tokens is not None:
            on_tokens(len(stream.tokens))

    stream.usage = await client.follow(path, {**fields, "temperature": 0, "return_token_ids": True}, take)
    if shown:
        out.print()
    return stream


async def busiest(client: Client, role: str, count: str) -> str:
    """The member of a role with most of something."""
    info = (await look(client)).info
    reports = backend_of(info).get("reports", {})
    names = [str(each["member"]) for each in info["members"] if each["role"] == role and each["state"] == "up"]
    return max(names, key=lambda name: reports.get(name, {}).get(count, 0))


def kill(fleet: Fleet, member: str) -> None:
    err.print(f"kill -9 {member}", style="red", markup=False)
    os.kill(fleet.pids[member], signal.SIGKILL)


async def until_up(client: Client, names: set[str]) -> None:
    """Until some members are up.

    Raises:
        TripoolError: they are not after a while.
    """
    try:
        async with asyncio.timeout(JOIN_S):
            while True:
                members = (await client.get("/server_info"))["members"]
                if names <= {each["member"] for each in members if each["state"] == "up"}:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise TripoolError(f"{', '.join(sorted(names))} did not come up within {JOIN_S:.0f} s") from error


@asynccontextmanager
async def watched(fleet: Fleet) -> AsyncIterator[None]:
    """Start members again that die, as `tripool serve` does."""

    async def watch() -> None:
        while True:
            await asyncio.to_thread(fleet.watch)
            await asyncio.sleep(0.2)

    task = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def say(text: str) -> None:
    out.print(f"\n{text}", style="bold cyan", markup=False)
