"""The mix: which document comes next.

A document is plain text, or a prompt with the answer that should follow it. The stream depends on its seed alone:
the same seed gives the same documents on every machine.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.tiny import chat
from recipes.tiny.text import stories, talk, tasks
from recipes.tiny.text.words import make_cast

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Tripool Tiny, a small language model.",
    "You are a friendly storyteller.",
    "Answer in one sentence.",
)


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of training text: `prompt` (rendered, may be the start marker alone) and what follows it."""

    task: str
    prompt: str
    answer: str         # without the end marker
    is_exact: bool = False  # only this answer is right

    @property
    def text(self) -> str:
        return self.prompt + self.answer + chat.EOS


# Share of documents, not of tokens: stories are long, facts are short.
MIX = {
    "story": 12, "story_request": 13, "story_question": 9, "story_continuation": 3,
    "fact": 12, "small_talk": 5, "introduction": 6, "advice": 2, "naming": 3, "recipe": 2, "summary": 1,
    "arithmetic": 8, "word_problem": 4, "ordering": 6, "copying": 6, "needle": 3, "lookup": 3, "code": 3, "json": 1,
    "tool_call": 3, "tool_answer": 2, "chinese": 8,
}  # fmt: skip

# Short exchanges only: what a reader asks first, and what has to be read often to be remembered.
TALK_MIX = {
    "fact": 40, "small_talk": 20, "introduction": 7, "arithmetic": 14, "word_problem": 3, "chinese": 10, "ordering": 5,
    "naming": 4, "recipe": 2, "code": 3,
}  # fmt: skip

# Answers that have to be found in the prompt.
BINDING_MIX = {
    "copying": 20, "lookup": 14, "introduction": 12, "story_question": 14, "needle": 5, "ordering": 12, "fact": 26,
    "small_talk": 8, "arithmetic": 12, "word_problem": 4, "chinese": 6, "tool_call": 5, "tool_answer": 4, "code": 3,
    "json": 3,
}  # fmt: skip


def _chat(task: str, turns: talk.Turns, rng: random.Random, steps: str = "", is_exact: bool = False) -> Document:
    messages = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for asked, answer in turns[:-1]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    asked, answer = turns[-1]
    messages.append({"role": "user", "content": asked})
    prompt = chat.render(messages, thinking=bool(steps))
    if steps:
        answer = f"{steps}\n</think>\n\n{answer}"
    return Document(task + ("_think" if steps else ""), prompt, answer, is_exact)


def _thoughts(asked: str, rng: random.Random) -> str:
    """Short reasoning for a question that needs none."""
    return rng.choice(["This is a simple question.", "I know this.", "The user asks a question. I will answer it."])


def _task_document(name: str, rng: random.Random) -> Document:
    thinks = rng.random() < 0.5
    if name == "arithmetic":
        task = tasks.arithmetic(rng, thinks)
    elif name == "word_problem":
        task = tasks.word_problem(rng, thinks)
    elif name == "ordering":
        task = tasks.ordering(rng, thinks)
    elif name == "copying":
        task = tasks.copying(rng, rng.choice([4, 8, 8, 16, 16, 24, 60, 150]))
    elif name == "needle":
        task = tasks.needle(rng, rng.choice([4, 8, 8, 16, 16, 35, 60, 90]))
        thinks = rng.random() < 0.1
    elif name == "lookup":
        task = tasks.lookup(rng, rng.choice([3, 5, 5, 10, 20, 40]))
        thinks = rng.random() < 0.1
    elif name == "code":
        task = tasks.code(rng)
        thinks = rng.random() < 0.2
    else:
        task = tasks.json_object(rng)
    return _chat(name, [(task.question, task.answer)], rng, task.steps if thinks else "", is_exact=True)


def _tool_document(name: str, rng: random.Random) -> Document:
    asked, tool, arguments, output, answer = tasks.tool_use(rng)
    names = [n for n in tasks.TOOLS if n != tool]
    tools = [tasks.TOOLS[n] for n in rng.sample(names, rng.choice([0, 1, 1, 2]))]
    tools.insert(rng.randint(0, len(tools)), tasks.TOOLS[tool])
    messages = [{"role": "user", "content": asked}]
    if name == "tool_call":
        if rng.random() < 0.15:
            asked, answer = talk.fact(rng)[0]
            return Document("no_tool", chat.render([{"role": "user", "content": asked}], tools), answer)
        return Document(name, chat.render(messages, tools), chat.call_text(tool, arguments), True)
    messages.append({"role": "assistant", "content": "", "tool_calls": [chat.tool_call(tool, arguments)]})
    messages.append({"role": "tool", "content": output})
    return Document(name, chat.render(messages, tools), answer, True)


def document(name: str, rng: random.Random) -> Document:
    """One document of the named kind."""
    if name.startswith("story"):
        text, cast = stories.story(rng)
        if name == "story":
            return Document(name, chat.BOS, text)
        if name == "story_request":
            lead = rng.choice(stories.LEADS)
            steps = ""
            if rng.random() < 0.12:
                steps = f"I will write about {cast['hero']} the {cast['kind']} and a {cast['thing']}."
            return _chat(name, [(stories.request(cast, rng), lead + text)], rng, steps)
        if name == "story_continuation":
            return _chat(name, [stories.continuation(text, rng)], rng)
        asked, answer = stories.question(text, cast, rng)
        if rng.random() < 0.5:
            turns = [(stories.request(cast, rng), text), (asked, answer)]
        else:
            turns = [(f"{text}\n\n{asked}", answer)]
        return _chat(name, turns, rng, is_exact=True)
    if name in ("arithmetic", "word_problem", "ordering", "copying", "needle", "lookup", "code", "json"):
        return _task_document(name, rng)
    if name.startswith("tool"):
        return _tool_document(name, rng)
    if name == "summary":
        return _chat(name, talk.summary(make_cast(rng), rng), rng, is_exact=True)
    turns = getattr(talk, name)(rng)
    if name == "fact":
        for _ in range(rng.choice([0, 0, 1, 2])):
            turns = rng.choice([talk.fact, talk.small_talk])(rng) + turns
    thinks = name in ("fact", "small_talk") and rng.random() < 0.15
    steps = _thoughts(turns[-1][0], rng) if thinks else ""
    return _chat(name, turns, rng, steps, is_exact=name in ("fact", "introduction", "recipe"))


def documents(seed: int, mix: dict[str, int] = MIX) -> Iterator[Document]:
    """The endless stream of documents of one seed."""
    rng = random.Random(seed)
    names, shares = list(mix), list(mix.values())
    while True:
        yield document(rng.choices(names, shares)[0], rng)
