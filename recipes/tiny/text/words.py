"""The small world the generated texts speak about, and the template language they are written in.

A template is a sentence with `{fields}` taken from a cast and `[this|that]` choices. Choices may be nested. A
reader of this file knows every name, thing and place a generated story can contain.
"""

import random
import re

GIRLS = (
    "Lily Mia Anna Rose Ella Ruby Nora Zoe Emma Ivy Clara Molly Sara Lucy Maya Grace Tara Hana Elsa June Nina Olive Pia "
    "Wren Mei"
).split()
BOYS = (
    "Tom Ben Max Sam Leo Hugo Jack Finn Noah Omar Luke Theo Adam Owen Jonas Kai Milo Toby Ravi Eric Paul Ned Felix Liam "
    "Jun"
).split()
ANIMALS = (
    "fox rabbit bear mouse frog duck squirrel turtle hedgehog badger cat puppy owl goat pony kitten otter beaver".split()
)
COLOURS = "red blue green yellow pink purple orange white black brown golden silver".split()
SIZES = ["little", "small", "big", "tiny"]
TRAITS = "kind brave curious clever shy cheerful careful quiet friendly gentle patient playful".split()
THINGS = (
    "ball kite hat book bell boat basket lantern drum box button blanket umbrella spoon scarf cup balloon key puzzle "
    "bucket wagon flute coin ring map shell feather teapot bag robot"
).split()
PLACES = (
    "park|garden|forest|beach|river|market|meadow|school|library|hill|farm|lake|village|barn|playground|bridge|old mill|"
    "orchard|harbour|station"
).split("|")
FOODS = (
    "bread|soup|apple pie|berries|cake|cheese|honey|pancakes|porridge|carrots|cookies|pears|plums|rice|noodles"
).split("|")
HELPERS = ["mother", "father", "grandmother", "grandfather", "teacher", "uncle", "aunt"]
WEATHER = ["sunny", "windy", "rainy", "cold", "warm", "snowy", "foggy"]

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_FIELD = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


def expand(template: str, cast: dict[str, str], rng: random.Random) -> str:
    """Make every choice in the template, then fill its fields; "a orange" becomes "an orange"."""
    while "[" in template:
        template = _CHOICE.sub(lambda m: rng.choice(m.group(1).split("|")), template)
    text = _FIELD.sub(lambda m: cast[m.group(1)], template)
    text = _ARTICLE.sub(lambda m: m.group(1) + "n ", text)
    return " ".join(text.split(" "))


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def listing(items: list[str]) -> str:
    """`a, b and c`"""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def pronouns(is_girl: bool, prefix: str = "") -> dict[str, str]:
    he, him, his = ("she", "her", "her") if is_girl else ("he", "him", "his")
    words = {"he": he, "him": him, "his": his, "He": he.capitalize(), "His": his.capitalize()}
    return {prefix + key: value for key, value in words.items()}


def make_cast(rng: random.Random) -> dict[str, str]:
    """A hero, a friend, a thing and a place: what a story is about."""
    hero_girl, friend_girl = rng.random() < 0.5, rng.random() < 0.5
    hero = rng.choice(GIRLS if hero_girl else BOYS)
    friend = rng.choice([n for n in (GIRLS if friend_girl else BOYS) if n != hero])
    kind, friend_kind = "girl" if hero_girl else "boy", "girl" if friend_girl else "boy"
    if rng.random() < 0.35:
        kind, friend_kind = rng.sample(ANIMALS, 2)
    thing, other = rng.sample(THINGS, 2)
    place, place2 = rng.sample(PLACES, 2)
    return {
        "hero": hero,
        "kind": kind,
        "friend": friend,
        "fkind": friend_kind,
        "thing": thing,
        "other": other,
        "place": place,
        "place2": place2,
        "colour": rng.choice(COLOURS),
        "size": rng.choice(SIZES),
        "trait": rng.choice(TRAITS),
        "food": rng.choice(FOODS),
        "helper": rng.choice(HELPERS),
        "weather": rng.choice(WEATHER),
        **pronouns(hero_girl),
        **pronouns(friend_girl, "f"),
    }
