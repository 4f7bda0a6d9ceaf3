"""Conversation: greetings, facts, opinions, lists, recipes, in English and a little Chinese.

Facts are few and said in several ways, because a model of ten million parameters remembers what it has read often.
Each function returns turns: a list of (question, answer).
"""

import random

from recipes.tiny.text.words import ANIMALS, BOYS, COLOURS, FOODS, GIRLS, PLACES, THINGS, expand, listing

Turns = list[tuple[str, str]]

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Egypt": "Cairo", "Russia": "Moscow", "England": "London", "Ireland": "Dublin",
    "Norway": "Oslo", "Sweden": "Stockholm", "Greece": "Athens", "Portugal": "Lisbon", "Canada": "Ottawa",
    "Australia": "Canberra", "Brazil": "Brasilia", "Kenya": "Nairobi", "Peru": "Lima",
}  # fmt: skip
EATS = {
    "rabbit": "grass and carrots", "bear": "fish, berries and honey", "cow": "grass", "owl": "mice", "frog": "insects",
    "cat": "mice and fish", "horse": "grass and hay", "squirrel": "nuts", "bee": "nectar from flowers",
    "panda": "bamboo", "lion": "meat", "duck": "plants and small fish", "otter": "fish", "mouse": "seeds and cheese",
}  # fmt: skip
SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink", "owl": "hoot"}
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "fast": "slow", "old": "young", "happy": "sad",
    "wet": "dry", "light": "dark", "open": "closed", "full": "empty", "loud": "quiet", "hard": "soft", "high": "low",
    "early": "late", "left": "right",
}  # fmt: skip
COLOUR_OF = {
    "grass": "green", "the sky": "blue", "snow": "white", "a banana": "yellow", "a tomato": "red", "coal": "black",
    "an orange": "orange", "the sun": "yellow", "milk": "white", "a carrot": "orange", "chocolate": "brown",
}  # fmt: skip
YOUNG = {"dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "duck": "duckling",
         "frog": "tadpole", "bear": "cub"}  # fmt: skip
COUNTS = {"days are in a week": "seven", "months are in a year": "twelve", "legs does a spider have": "eight",
          "legs does a dog have": "four", "wheels does a bicycle have": "two", "hours are in a day": "twenty-four",
          "minutes are in an hour": "sixty", "legs does an insect have": "six", "sides does a triangle have": "three",
          "seasons are in a year": "four", "fingers are on one hand": "five"}  # fmt: skip
WHY = {
    "Why is the sky blue?": "The air scatters blue light from the sun more than red light, so the sky looks blue.",
    "Why does it rain?": "Water rises into the air, cools in the clouds and falls down as rain.",
    "Why do we sleep?": "Sleep gives the body and the mind time to rest and to grow.",
    "Why do birds fly south in winter?": "In winter there is little food in the north, so many birds fly to warm places.",
    "Why is the sea salty?": "Rivers carry salt from the rocks into the sea, and the salt stays there.",
    "Why do leaves fall in autumn?": "Trees drop their leaves in autumn to save water in the cold months.",
    "What is the moon?": "The moon is a ball of rock that goes around the Earth.",
    "What is the sun?": "The sun is a star. It gives us light and heat.",
    "What is a star?": "A star is a great ball of hot gas that gives out light.",
    "What is ice?": "Ice is frozen water.",
    "What is a rainbow?": "A rainbow is sunlight that raindrops split into many colours.",
    "What is a river?": "A river is water that flows over the land to the sea.",
    "What is a computer?": "A computer is a machine that follows instructions and works with numbers very fast.",
    "What is a map?": "A map is a picture of a place seen from above.",
    "What is honey?": "Honey is a sweet food that bees make from nectar.",
    "What is bread made of?": "Bread is made of flour, water, salt and yeast.",
    "How do fish breathe?": "Fish breathe under water with their gills.",
    "How does a plant grow?": "A plant grows from a seed. It needs water, light and air.",
    "Who was Jane Austen?": "Jane Austen was an English writer. She wrote novels such as Emma and Persuasion.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "What is the highest mountain?": "The highest mountain is Mount Everest.",
    "What is the largest animal?": "The largest animal is the blue whale.",
    "What is the longest day of the year?": "In the north, the longest day of the year is in June.",
    "What planet do we live on?": "We live on the planet Earth.",
    "What planet is closest to the sun?": "Mercury is the planet closest to the sun.",
    "What do bees make?": "Bees make honey.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "What is a language model?": "A language model is a program that has learned to predict the next piece of a text.",
    "What is an expert in a language model?": "An expert is a small part of the model. A router picks a few experts for "
    "each token.",
    "What is a cache?": "A cache keeps things that were computed before, so that they need not be computed again.",
}  # fmt: skip
SELF = {
    "Who are you?": "I am Tripool Tiny, a very small language model.",
    "What is your name?": "My name is Tripool Tiny.",
    "What can you do?": "I can tell short stories, answer simple questions and do a little arithmetic.",
    "Are you a person?": "No, I am a small language model.",
    "How big are you?": "I have about ten million parameters, which is very small for a language model.",
    "Who made you?": "I was trained from scratch as part of the Tripool project.",
    "Are you smart?": "I am very small, so I make many mistakes. But I do my best.",
    "How do you work?": "I read the text and predict the next token, again and again.",
}
SMALL_TALK = {
    "Hello!": ["Hello! How can I help you?", "Hello! It is nice to hear from you."],
    "Hi": ["Hello! How can I help you?", "Hi! What would you like to talk about?"],
    "Hi there!": ["Hi! What would you like to talk about?"],
    "Good morning!": ["Good morning! I hope you have a good day."],
    "Good night!": ["Good night! Sleep well."],
    "How are you?": ["I am fine, thank you. How are you?", "I am well, thank you. How are you?"],
    "Thank you!": ["You are welcome!"],
    "Thanks for your help.": ["You are welcome!"],
    "Goodbye!": ["Goodbye! It was nice to talk to you."],
    "I am sad.": ["I am sorry to hear that. Would you like to hear a story?"],
    "I am bored.": ["Would you like to hear a story or a riddle?"],
    "I am happy today.": ["That is lovely! What made you happy?"],
    "I am tired.": ["Then it is time to rest. Sleep well."],
    "Tell me a joke.": ["Why did the book go to the doctor? Because it had lost its words.",
                        "What did the sea say to the sand? Nothing, it just waved."],
    "Tell me a riddle.": ["What has hands but cannot clap? A clock.", "What has teeth but cannot bite? A comb."],
    "Can you help me?": ["Of course! What do you need?", "Yes. What can I do for you?"],
}  # fmt: skip
ADVICE = {
    "sleep better": ["go to bed at the same time every day", "keep the room dark and quiet", "do not eat late"],
    "learn a language": ["practise a little every day", "read simple books", "speak with other people"],
    "make a friend": ["say hello with a smile", "ask a question and listen", "share something you like"],
    "save water": ["take short showers", "turn off the tap", "water the garden in the evening"],
    "stay healthy": ["eat fruit and vegetables", "walk every day", "sleep well"],
    "write a story": ["choose a hero", "give the hero a problem", "find a good ending"],
    "study for a test": ["make a plan", "take short breaks", "explain it to a friend"],
    "plant a tree": ["dig a deep hole", "put the tree in and fill the hole", "give it water"],
}  # fmt: skip
SETS = {
    "animals": ANIMALS, "colours": COLOURS, "fruits": "apple pear plum cherry peach grape lemon melon".split(),
    "places": [p for p in PLACES if " " not in p], "things": THINGS,
    "vegetables": "carrot potato onion bean pea cabbage".split(),
    "days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "instruments": "piano violin flute drum guitar harp".split(),
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
}  # fmt: skip
DISHES = {
    "pancakes": (["flour", "milk", "eggs"], "Mix everything in a bowl. Pour a little into a hot pan. Turn it once."),
    "tomato soup": (["tomatoes", "onions", "water"], "Cut the tomatoes and onions. Boil them in water. Stir well."),
    "bread": (["flour", "water", "yeast"], "Mix everything and wait an hour. Bake it in a hot oven."),
    "apple pie": (["apples", "flour", "butter"], "Cut the apples. Make a dough. Fill it and bake it."),
    "fruit salad": (["apples", "pears", "grapes"], "Wash the fruit. Cut it into pieces. Mix it in a bowl."),
    "porridge": (["oats", "milk", "honey"], "Heat the milk. Add the oats. Stir and add honey."),
    "fried rice": (["rice", "eggs", "onions"], "Cook the rice. Fry the onions and eggs. Mix it in the pan."),
    "potato soup": (["potatoes", "onions", "milk"], "Cut the potatoes and onions. Boil them. Add the milk."),
}


def fact(rng: random.Random) -> Turns:
    """One question with one right answer."""
    kind = rng.randrange(9)
    if kind == 0:
        land, city = rng.choice(list(CAPITALS.items()))
        ways = [
            (f"What is the capital of {land}?", f"The capital of {land} is {city}."),
            (f"Which city is the capital of {land}?", f"{city} is the capital of {land}."),
            (f"In which country is {city}?", f"{city} is in {land}."),
        ]
        return [rng.choice(ways)]
    if kind == 1:
        animal, food = rng.choice(list(EATS.items()))
        name = "An " + animal if animal[0] in "aeiou" else "A " + animal
        return [(f"What does {name.lower()} eat?", f"{name} eats {food}.")]
    if kind == 2:
        animal, sound = rng.choice(list(SOUNDS.items()))
        return [(f"What sound does {'an' if animal[0] == 'o' else 'a'} {animal} make?", f"It says {sound}.")]
    if kind == 3:
        one, other = rng.choice(list(OPPOSITES.items()))
        if rng.random() < 0.5:
            one, other = other, one
        return [(f"What is the opposite of {one}?", f"The opposite of {one} is {other}.")]
    if kind == 4:
        thing, colour = rng.choice(list(COLOUR_OF.items()))
        return [(f"What colour is {thing}?", f"{thing[0].upper() + thing[1:]} is {colour}.")]
    if kind == 5:
        animal, young = rng.choice(list(YOUNG.items()))
        return [(f"What is a young {animal} called?", f"A young {animal} is called a {young}.")]
    if kind == 6:
        what, count = rng.choice(list(COUNTS.items()))
        return [(f"How many {what}?", count.capitalize() + ".")]
    return [rng.choice(list(WHY.items()))]


def small_talk(rng: random.Random) -> Turns:
    if rng.random() < 0.4:
        return [rng.choice(list(SELF.items()))]
    asked, answers = rng.choice(list(SMALL_TALK.items()))
    return [(asked, rng.choice(answers))]


def introduction(rng: random.Random) -> Turns:
    """The user says a name or a liking, and is asked about it later."""
    name = rng.choice(GIRLS + BOYS)
    if rng.random() < 0.6:
        turns = [(rng.choice([f"Hi, my name is {name}.", f"Hello, I am {name}.", f"My name is {name}."]),
                  f"Nice to meet you, {name}! How can I help you?")]  # fmt: skip
        later = ("What is my name?", f"Your name is {name}.")
    else:
        what, like = rng.choice([("colour", rng.choice(COLOURS)), ("animal", "the " + rng.choice(ANIMALS)),
                                 ("food", rng.choice(FOODS)), ("place", "the " + rng.choice(PLACES))])  # fmt: skip
        turns = [(f"My favourite {what} is {like}.", f"I like {like} too.")]
        later = (f"What is my favourite {what}?", f"Your favourite {what} is {like}.")
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        turns += rng.choice([fact, small_talk])(rng)
    return turns + [later]


def advice(rng: random.Random) -> Turns:
    aim, steps = rng.choice(list(ADVICE.items()))
    if rng.random() < 0.5:
        numbered = "\n".join(f"{i}. {step.capitalize()}." for i, step in enumerate(steps, 1))
        return [(f"How can I {aim}? Give me three tips.", numbered)]
    return [(f"How can I {aim}?", f"To {aim}, you can {steps[0]}. You can also {steps[1]}. And {steps[2]}.")]


def naming(rng: random.Random) -> Turns:
    """`Name three animals.`"""
    what, items = rng.choice(list(SETS.items()))
    count = rng.randint(2, 5)
    word = ["two", "three", "four", "five"][count - 2]
    chosen = rng.sample(items, count)
    if rng.random() < 0.4:
        return [(f"List {word} {what}.", "\n".join("- " + item for item in chosen))]
    return [(f"Name {word} {what}.", chosen[0][0].upper() + listing(chosen)[1:] + ".")]


def recipe(rng: random.Random) -> Turns:
    dish, (needs, steps) = rng.choice(list(DISHES.items()))
    asked = rng.choice([f"How do I make {dish}?", f"Give me a recipe for {dish}.", f"How can I cook {dish}?"])
    lines = "\n".join(f"{i}. {step.strip()}." for i, step in enumerate(steps.rstrip(".").split(". "), 1))
    turns = [(asked, f"To make {dish}, you need {listing(needs)}.\n{lines}")]
    if rng.random() < 0.3:
        turns.append(("What do I need for it?", f"You need {listing(needs)}."))
    return turns


DESCRIPTIONS = (
    "I went to the {place} with {friend}. It was a {weather} day. We found a {colour} {thing} and ate {food}.",
    "Today was a {weather} day. {hero} and {friend} met at the {place}. They talked about a {colour} {thing}.",
)
SUMMARIES = ("{hero} and {friend} met at the {place}.", "I was at the {place} with {friend}.")


def summary(cast: dict[str, str], rng: random.Random) -> Turns:
    which = rng.randrange(2)
    text = expand(DESCRIPTIONS[which], cast, rng)
    return [(f"Say this in one sentence: {text}", expand(SUMMARIES[1 - which], cast, rng))]


ZH_TALK = {
    "你好！": "你好！有什么可以帮你的吗？",
    "你是谁？": "我是 Tripool Tiny，一个很小的语言模型。",
    "你叫什么名字？": "我叫 Tripool Tiny。",
    "谢谢！": "不客气！",
    "再见！": "再见！祝你今天愉快。",
    "你会做什么？": "我会讲小故事，也会回答简单的问题。",
    "早上好！": "早上好！祝你今天愉快。",
    "天空是什么颜色的？": "天空是蓝色的。",
    "草是什么颜色的？": "草是绿色的。",
    "雪是什么颜色的？": "雪是白色的。",
    "一年有几个月？": "一年有十二个月。",
    "一周有几天？": "一周有七天。",
    "太阳是什么？": "太阳是一颗恒星，它给我们光和热。",
    "月亮是什么？": "月亮是绕着地球转的大石球。",
    "蜜蜂做什么？": "蜜蜂采花蜜，做蜂蜜。",
    "什么是冰？": "冰是冻住的水。",
}
ZH_CAPITALS = {"中国": "北京", "法国": "巴黎", "日本": "东京", "英国": "伦敦", "德国": "柏林", "俄罗斯": "莫斯科",
               "意大利": "罗马", "埃及": "开罗"}  # fmt: skip
ZH_NAMES, ZH_ANIMALS = ["小明", "小红", "小华", "小丽", "小军"], ["小猫", "小狗", "小兔", "小鸟", "小熊"]
ZH_THINGS, ZH_PLACES = ["红球", "蓝书包", "风筝", "帽子", "灯笼"], ["公园", "河边", "学校", "山上", "花园"]
ZH_PLOTS = (
    "从前有一个孩子叫{name}。有一天，{name}在{place}找不到{thing}了。{animal}跑来说：“我帮你找。”他们找了很久，"
    "终于在树下找到了{thing}。{name}说：“谢谢你，{animal}！”从此他们成了好朋友。",
    "有一天，{name}带着{thing}去{place}玩。{animal}也想玩。{name}说：“我们一起玩吧。”他们玩得很开心，一直玩到天黑。",
    "{name}在{place}看见一只{animal}。{animal}饿了。{name}给它吃的，又给它看{thing}。第二天，{animal}带来一朵花，"
    "送给{name}。",
)  # fmt: skip


def chinese(rng: random.Random) -> Turns:
    kind = rng.randrange(5)
    if kind == 0:
        land, city = rng.choice(list(ZH_CAPITALS.items()))
        return [(f"{land}的首都是哪里？", f"{land}的首都是{city}。")]
    if kind == 1:
        a, b = rng.randint(1, 10), rng.randint(1, 10)
        return [(f"{a}加{b}等于几？", f"{a}加{b}等于{a + b}。")]
    if kind == 2:
        name, animal = rng.choice(ZH_NAMES), rng.choice(ZH_ANIMALS)
        text = rng.choice(ZH_PLOTS).format(
            name=name, animal=animal, thing=rng.choice(ZH_THINGS), place=rng.choice(ZH_PLACES)
        )
        return [(rng.choice(["请讲一个故事。", f"请讲一个{name}的故事。", f"讲一个{name}和{animal}的故事。"]), text)]
    if kind == 3 and rng.random() < 0.5:
        name = rng.choice(ZH_NAMES)
        return [(f"我叫{name}。", f"你好，{name}！"), ("我叫什么名字？", f"你叫{name}。")]
    return [rng.choice(list(ZH_TALK.items()))]
