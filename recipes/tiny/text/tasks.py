"""Tasks with one right answer: arithmetic, ordering, copying, recall over distance, small code, tool calls.

A reasoned task also gives the steps that lead to its answer; they are what the model writes inside `<think>`.
Copying and recall reach over hundreds of tokens, so that a serving system which mixes up two pages of its cache is
seen to do so.
"""

import json
import random
from dataclasses import dataclass

from recipes.tiny.text.words import ANIMALS, BOYS, COLOURS, FOODS, GIRLS, PLACES, THINGS

NAMES = GIRLS + BOYS
WORDS = THINGS + ANIMALS + [p for p in PLACES if " " not in p]


@dataclass(frozen=True, slots=True)
class Task:
    """A question, the steps towards its answer (may be empty) and the answer."""

    question: str
    steps: str
    answer: str


def _operands(rng: random.Random, reasoned: bool) -> tuple[int, str, int, int]:
    sign = rng.choice("+++--*")
    if sign == "*":
        a, b = rng.randint(1, 10), rng.randint(1, 10)
        return a, sign, b, a * b
    top = 99 if reasoned else rng.choice([10, 10, 20])
    a, b = rng.randint(0, top), rng.randint(0, top)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    return a, sign, b, a + b if sign == "+" else a - b


def _column_steps(a: int, sign: str, b: int, result: int) -> str:
    if sign == "*":
        return f"I need {a} times {b}. {a} times {b} is {result}."
    if a < 10 and b < 10:
        return f"{a} {sign} {b} is {result}."
    (ta, oa), (tb, ob) = divmod(a, 10), divmod(b, 10)
    if sign == "+":
        ones = oa + ob
        carry, digit = divmod(ones, 10)
        carried = f" write {digit}, carry {carry}." if carry else f" write {digit}."
        tens = f" Tens: {ta} + {tb}" + (f" + {carry}" if carry else "") + f" = {ta + tb + carry}."
        return f"Ones: {oa} + {ob} = {ones},{carried}{tens} Result: {result}."
    if oa >= ob:
        return f"Ones: {oa} - {ob} = {oa - ob}. Tens: {ta} - {tb} = {ta - tb}. Result: {result}."
    return (
        f"Ones: {oa} is less than {ob}, borrow. {oa + 10} - {ob} = {oa + 10 - ob}. Tens: {ta - 1} - {tb} = "
        f"{ta - 1 - tb}. Result: {result}."
    )


def arithmetic(rng: random.Random, reasoned: bool = False) -> Task:
    a, sign, b, result = _operands(rng, reasoned)
    asked = rng.choice(["What is {e}?", "What is {e}?", "Calculate {e}.", "{e} = ?", "How much is {e}?"])
    return Task(asked.format(e=f"{a} {sign} {b}"), _column_steps(a, sign, b, result), f"The answer is {result}.")


def word_problem(rng: random.Random, reasoned: bool = False) -> Task:
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(["apples", "coins", "books", "shells", "pears", "balls", "eggs", "stones", "flowers"])
    a, b = rng.randint(3, 15), rng.randint(1, 9)
    if rng.random() < 0.5:
        story = rng.choice(["{o} gives {n} {b} more.", "Then {n} finds {b} more.", "{n} buys {b} more."])
        sign, result, word = "+", a + b, "more means adding"
    else:
        b = min(b, a)
        story = rng.choice(["{n} gives {b} to {o}.", "Then {n} loses {b}.", "{n} sells {b}."])
        sign, result, word = "-", a - b, "fewer means taking away"
    text = f"{name} has {a} {thing}. {story.format(n=name, o=other, b=b)} How many {thing} does {name} have now?"
    steps = f"{name} starts with {a} {thing}. {b} {word}: {a} {sign} {b} = {result}."
    return Task(text, steps, f"{name} has {result} {thing} now.")


def ordering(rng: random.Random, reasoned: bool = False) -> Task:
    """Sort, reverse, count, first, last, largest."""
    kind = rng.randrange(7)
    count = rng.randint(3, 5)
    if kind < 3:
        numbers = rng.sample(range(1, 21), count)
        text = ", ".join(map(str, numbers))
        if kind == 0:
            answer = ", ".join(map(str, sorted(numbers)))
            return Task(f"Sort these numbers: {text}", f"The smallest is {min(numbers)}. The order is {answer}.", answer)
        if kind == 1:
            steps = f"I look at {text}. The largest is {max(numbers)}."
            return Task(f"Which number is the largest: {text}?", steps, f"The largest number is {max(numbers)}.")
        steps = f"I look at {text}. The smallest is {min(numbers)}."
        return Task(f"Which number is the smallest: {text}?", steps, f"The smallest number is {min(numbers)}.")
    words = rng.sample(WORDS, count)
    text = ", ".join(words)
    if kind == 3:
        answer = ", ".join(reversed(words))
        return Task(f"Reverse this list: {text}", f"I start at the end: {words[-1]}.", answer)
    if kind == 4:
        steps = ", ".join(f"{i} {w}" for i, w in enumerate(words, 1))
        return Task(f"How many words are in this list: {text}?", f"I count: {steps}.", f"There are {count} words.")
    which, word = ("first", words[0]) if kind == 5 else ("last", words[-1])
    return Task(f"What is the {which} word in this list: {text}?", f"The {which} word is {word}.", f"The {which} word is {word}.")


def copying(rng: random.Random, size: int) -> Task:
    """Say again what was said: words, or pairs of a thing and a number."""
    if rng.random() < 0.5:
        text = " ".join(rng.choice(WORDS + COLOURS + NAMES) for _ in range(size))
    else:
        text = ", ".join(f"{rng.choice(WORDS)} {rng.randint(10, 99)}" for _ in range(max(2, size // 3)))
    return Task(rng.choice(["Repeat after me: ", "Copy this text: "]) + text, "", text)


_NEEDLES = (
    ("The secret word is {word}.", "What is the secret word?", "The secret word is {word}."),
    ("The number of the {place} is {number}.", "What is the number of the {place}?", "The number of the {place} is {number}."),
    ("{name} hid the {word} in the {place}.", "Where is the {word}?", "The {word} is in the {place}."),
    ("{name}'s code is {number}.", "What is {name}'s code?", "{name}'s code is {number}."),
)  # fmt: skip


def _filler(rng: random.Random) -> str:
    return rng.choice((
        "{n} likes the {c} {t}.", "The {t} is near the {p}.", "{n} went to the {p}.", "It was a day like any other.",
        "{n} ate {f} and looked at the {t}.", "The {a} sat by the {p}.", "{n} and the {a} played.",
    )).format(n=rng.choice(NAMES), c=rng.choice(COLOURS), t=rng.choice(THINGS), p=rng.choice(PLACES),
              f=rng.choice(FOODS), a=rng.choice(ANIMALS))  # fmt: skip


def needle(rng: random.Random, sentences: int) -> Task:
    """Remember one sentence among many."""
    told, asked, answer = rng.choice(_NEEDLES)
    words = dict(word=rng.choice(THINGS), place=rng.choice(PLACES), number=rng.randint(100, 999), name=rng.choice(NAMES))
    text = [_filler(rng) for _ in range(sentences)]
    text.insert(rng.randrange(len(text) + 1), told.format(**words))
    question = asked.format(**words)
    return Task(" ".join(text) + "\n\n" + question, told.format(**words), answer.format(**words))


def lookup(rng: random.Random, pairs: int) -> Task:
    """A table of names and numbers, and one row of it."""
    names = rng.sample(NAMES, min(pairs, len(NAMES)))
    numbers = [rng.randint(10, 99) for _ in names]
    chosen = rng.randrange(len(names))
    table = "\n".join(f"{n}: {v}" for n, v in zip(names, numbers, strict=True))
    answer = f"{names[chosen]}: {numbers[chosen]}"
    return Task(f"{table}\n\nWhat is the number of {names[chosen]}?", f"The row is {answer}.", f"The number of {names[chosen]} is {numbers[chosen]}.")


_CODE = (
    ("adds two numbers", "add", "a, b", "return a + b"),
    ("subtracts two numbers", "subtract", "a, b", "return a - b"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b"),
    ("returns the larger of two numbers", "larger", "a, b", "return max(a, b)"),
    ("returns the smaller of two numbers", "smaller", "a, b", "return min(a, b)"),
    ("returns the square of a number", "square", "x", "return x * x"),
    ("doubles a number", "double", "x", "return 2 * x"),
    ("checks if a number is even", "is_even", "x", "return x % 2 == 0"),
    ("checks if a number is odd", "is_odd", "x", "return x % 2 == 1"),
    ("reverses a list", "reverse", "items", "return items[::-1]"),
    ("returns the length of a list", "length", "items", "return len(items)"),
    ("sums a list", "total", "items", "return sum(items)"),
    ("returns the first item of a list", "first", "items", "return items[0]"),
    ("returns the last item of a list", "last", "items", "return items[-1]"),
    ("sorts a list", "in_order", "items", "return sorted(items)"),
    ("says hello to a name", "hello", "name", 'return "Hello, " + name'),
)


def code(rng: random.Random) -> Task:
    what, name, arguments, body = rng.choice(_CODE)
    called = ""
    if rng.random() < 0.3:
        name = rng.choice(THINGS)
        called = f" called {name}"
    asked = rng.choice(["Write a Python function{c} that {w}.", "Write a function{c} that {w}."]).format(c=called, w=what)
    return Task(asked, f"The function {what}.", f"```python\ndef {name}({arguments}):\n    {body}\n```")


def json_object(rng: random.Random) -> Task:
    name, age, city = rng.choice(NAMES), rng.randint(3, 90), rng.choice(["Paris", "London", "Rome", "Tokyo", "Cairo"])
    asked = f"Write this as JSON: {name} is {age} years old and lives in {city}."
    return Task(asked, "", json.dumps({"name": name, "age": age, "city": city}))


def tool(name: str, description: str, **parameters: str) -> dict:
    """A tool in the OpenAI form; every parameter is required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "get_weather": tool("get_weather", "Get the weather of a city.", city="string"),
    "get_time": tool("get_time", "Get the time in a city.", city="string"),
    "add": tool("add", "Add two numbers.", a="integer", b="integer"),
    "search": tool("search", "Search for a word.", query="string"),
    "send_message": tool("send_message", "Send a message to a person.", to="string", text="string"),
}
CITIES = ["Paris", "London", "Rome", "Tokyo", "Cairo", "Berlin", "Madrid", "Oslo", "Lima", "Dublin"]


def tool_use(rng: random.Random) -> tuple[str, str, dict, str, str]:
    """A question, the tool and arguments it needs, what the tool says, and the answer."""
    name = rng.choice(list(TOOLS))
    city, person = rng.choice(CITIES), rng.choice(NAMES)
    if name == "get_weather":
        degrees, sky = rng.randint(1, 35), rng.choice(["sunny", "rainy", "windy", "cloudy", "snowy"])
        asked = rng.choice([f"What is the weather in {city}?", f"How is the weather in {city} today?"])
        output = json.dumps({"weather": sky, "degrees": degrees})
        return asked, name, {"city": city}, output, f"It is {sky} in {city}, with {degrees} degrees."
    if name == "get_time":
        time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        return f"What time is it in {city}?", name, {"city": city}, json.dumps({"time": time}), f"It is {time} in {city}."
    if name == "add":
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        answer = f"{a} + {b} is {a + b}."
        return f"What is {a} + {b}? Use the tool.", name, {"a": a, "b": b}, json.dumps({"sum": a + b}), answer
    if name == "search":
        thing, place = rng.choice(THINGS), rng.choice(PLACES)
        output = json.dumps({"result": f"The {thing} is at the {place}."})
        return f"Search for the {thing}.", name, {"query": thing}, output, f"The {thing} is at the {place}."
    text = rng.choice(["hello", "good night", "see you soon", "happy birthday", "come home"])
    asked = f"Send {text} to {person}."
    return asked, name, {"to": person, "text": text}, json.dumps({"ok": True}), f"I sent {text} to {person}."
