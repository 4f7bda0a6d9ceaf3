"""Thirty small plots, and the ways of asking for them and about them.

A plot is a template (see `words`). Every plot names its hero, the hero's kind and the thing it is about, so that a
request ("a story about a fox and a kite") and a question ("what colour was the kite?") can be answered from the text.
"""

import random

from recipes.tiny.text.words import expand, make_cast

OPENINGS = (
    "Once upon a time, there was a {trait} {kind} named {hero}.",
    "Once upon a time, a {trait} {kind} named {hero} lived near the {place2}.",
    "There once was a {kind} called {hero}. {hero} was very {trait}.",
    "In a small house by the {place2} lived a {trait} {kind} named {hero}.",
    "{hero} was a {trait} {kind} who loved the {place}.",
)

# name: (plot, lesson)
PLOTS: dict[str, tuple[str, str]] = {
    "sharing": (
        "{He} had a {colour} {thing} that {his} {helper} had made. [One {weather} day|One morning], {hero} took the "
        "{thing} to the {place}. A {fkind} named {friend} saw it. \"[Can I play with it?|May I try it, please?]\" asked "
        "{friend}. \"No, it is mine,\" said {hero}. {hero} walked away and sat alone. Soon {hero} felt lonely. Playing "
        "alone was [no fun|not much fun]. So {hero} ran back to {friend} and said, \"[You can play too.|Let us share it.]\" "
        "They played with the {colour} {thing} until the sun went down.",
        "sharing makes play more fun",
    ),
    "lost": (
        "{hero} had a {colour} {thing}, and {he} took it everywhere. [One day|One {weather} morning], {hero} could not "
        "find the {thing}. {He} looked under the bed. {He} looked behind the door. It was not there. \"[Where is my {thing}?"
        "|Oh no, my {thing} is gone!]\" {he} cried. {friend} the {fkind} came to help. They walked all the way to the "
        "{place}. There, under a bush, was the {colour} {thing}. \"[Thank you, {friend}!|You are a true friend!]\" said "
        "{hero}. From that day on, {hero} [kept it safe|took better care of it].",
        "friends help us to find what is lost",
    ),
    "storm": (
        "{hero} and {friend} the {fkind} were playing at the {place}. {hero} had brought a {colour} {thing}. [Dark clouds "
        "filled the sky|The sky turned grey]. Then came [loud thunder|a great flash of light]. {friend} was afraid. \"Do not "
        "worry,\" said {hero}. \"We can hide in the {place2}.\" They ran as fast as they could. Inside it was warm and dry. "
        "{hero} put the {thing} between them and told a funny story. Soon {friend} was laughing. When the rain stopped, "
        "they saw a [rainbow|big rainbow] over the {place}.",
        "a brave friend makes a storm feel small",
    ),
    "baking": (
        "{hero} wanted to make {food} for {his} {helper}. {He} put a {colour} {thing} on the table for luck. First {he} "
        "washed {his} hands. Then {he} mixed [everything|flour, milk and eggs] in a bowl. But {hero} used too much salt! The "
        "{food} tasted [awful|very bad]. {hero} wanted to cry. {friend} the {fkind} said, \"[Let us try again.|We can do it "
        "together.]\" This time they [measured|tasted] with care. The {food} was [perfect|wonderful], and {his} {helper} ate "
        "two plates.",
        "it is good to try again",
    ),
    "wish": (
        "One {weather} night, {hero} found a {colour} {thing} at the {place}. When {he} touched it, it began to [shine|glow]. "
        "\"I can give you one wish,\" said the {thing}. {hero} thought for a long time. {He} could ask for gold. {He} could "
        "ask for {food}. But {he} remembered {friend} the {fkind}, who was sick. \"I wish that {friend} feels better,\" said "
        "{hero}. In the morning, {friend} was [well again|dancing in the garden]. {hero} smiled and [never told anyone|kept "
        "the secret].",
        "the best wish is one for a friend",
    ),
    "race": (
        "Every year there was a race from the {place} to the {place2}. The prize was a {colour} {thing}. {friend} the {fkind} "
        "was [very fast|the fastest of all]. \"I will win,\" said {friend}. {hero} was slow, but {he} did not stop. Half way, "
        "{friend} sat down to eat {food} and fell asleep. {hero} walked past, step by step. When {friend} woke up, {hero} was "
        "already at the {place2}. Everyone cheered. {hero} won the {thing} and let {friend} [hold it|play with it].",
        "slow and steady wins the race",
    ),
    "new_friend": (
        "{hero} was new in the village and knew nobody. Each day {he} sat at the {place} with {his} {colour} {thing}. [One "
        "{weather} day|One afternoon], a {fkind} came and sat down too. \"[Hello, I am {friend}|My name is {friend}],\" said "
        "the {fkind}. \"I like your {thing}.\" {hero} smiled. \"Do you want to see how it works?\" {he} asked. They talked "
        "and played all day. Then {friend} gave {hero} some {food}. Now {hero} had a friend, and the village felt like home.",
        "a kind word can start a friendship",
    ),
    "broken": (
        "{hero} found {his} {helper}'s {colour} {thing} and wanted to play with it. {He} ran [too fast|around the house], and "
        "the {thing} fell down. Crack! It was broken. {hero} hid it under the bed. That night {he} could not sleep. In the "
        "morning {he} told the truth. \"I am sorry,\" {he} said. \"I broke your {thing}.\" {His} {helper} was [quiet for a "
        "moment|not angry]. \"Thank you for telling me,\" said the {helper}. Together they mended the {thing} with glue, and "
        "{friend} the {fkind} came to help.",
        "telling the truth makes the heart light",
    ),
    "garden": (
        "In spring, {hero} planted [a seed|three seeds] at the {place}. {He} put a {colour} {thing} next to it, so that {he} "
        "would not forget the spot. Every day {he} gave it water. Nothing happened. \"It will never grow,\" said {friend} the "
        "{fkind}. But {hero} was patient. [After many days|After two weeks], a small green leaf came up. In summer there was "
        "a [tall flower|great yellow flower]. \"You were right to wait,\" said {friend}. They sat by the flower and ate "
        "{food}.",
        "good things need time",
    ),
    "night": (
        "{hero} was afraid of the dark. Every night {he} heard [strange sounds|a tapping sound]. \"Is it a monster?\" {he} "
        "asked. {His} {helper} gave {him} a {colour} {thing}. \"Hold this, and you will be brave,\" said the {helper}. {hero} "
        "held the {thing} and opened the door. There was no monster. It was only {friend} the {fkind}, who was [looking for "
        "{food}|cold and hungry]. {hero} laughed and let {friend} come in. After that night, {hero} was not afraid any more.",
        "the dark is not so bad when we look",
    ),
    "bridge": (
        "{hero} wanted to go to the {place}, but the way was long. At the river there was an old bridge. In the middle stood "
        "{friend} the {fkind}. \"I was here first,\" said {friend}. \"No, I was,\" said {hero}. They pushed, and splash! Both "
        "fell into the water. {hero}'s {colour} {thing} floated away. {friend} swam after it and brought it back. \"[I am "
        "sorry|We were silly],\" said {friend}. \"Next time you go first,\" said {hero}. Then they shared some {food} and "
        "dried in the sun.",
        "it is better to give way than to fight",
    ),
    "birthday": (
        "It was {hero}'s birthday, but nobody said a word about it. {He} went to the {place} and felt sad. \"They all "
        "forgot,\" {he} thought. Then {he} saw a {colour} {thing} on the path. Next to it was a note. It said, \"Go to the "
        "{place2}.\" {hero} ran there. \"Surprise!\" shouted {friend} the {fkind}. All {his} friends were there with {food} "
        "and music. {hero} was [so happy|full of joy]. It was the best birthday ever.",
        "friends do not forget",
    ),
    "music": (
        "{hero} wanted to play music, but {he} had only a {colour} {thing}. {He} tapped it with a stick. Tap, tap, tap! "
        "\"That is just noise,\" said {friend} the {fkind}. {hero} went to the {place} and practised every day. [Slowly|Bit by "
        "bit], the noise became a song. One {weather} evening, {friend} heard the song and [began to dance|stopped to "
        "listen]. Soon the whole village was dancing. \"I was wrong,\" said {friend}. \"Your music is lovely.\"",
        "practice turns noise into music",
    ),
    "kitten": (
        "On a {weather} day, {hero} heard a soft cry at the {place}. Up in a tree sat a tiny kitten. It could not come down. "
        "{hero} climbed up, but the branch was thin. \"Wait!\" called {friend} the {fkind}. {friend} held up a {colour} "
        "{thing}. \"Put the kitten in here.\" {hero} put the kitten in the {thing} and let it down with a rope. The kitten "
        "was safe. They gave it milk and {food}. It followed {hero} home and slept on {his} bed.",
        "two friends can do what one cannot",
    ),
    "map": (
        "{hero} found an old map inside a {colour} {thing}. The map showed a path from the {place} to the {place2}. \"Let us "
        "look for treasure,\" said {hero} to {friend} the {fkind}. They [packed some {food}|took a lamp] and went off. They "
        "walked past three tall trees. They counted ten steps and began to dig. Deep down was a box. There was no gold in it, "
        "only a letter. It said, \"The real treasure is the friend who came with you.\" {hero} and {friend} [laughed all the "
        "way home|looked at each other and smiled].",
        "a friend is the real treasure",
    ),
    "boast": (
        "{friend} the {fkind} had a {colour} {thing}. \"It is the best {thing} in the world,\" said {friend}. \"Nobody else may "
        "touch it.\" {hero} said nothing. One {weather} day, {friend} lost the {thing} at the {place}. {friend} asked everyone "
        "for help, but nobody came. Only {hero} came. {He} looked all day and found it in the grass. \"Why did you help me?\" "
        "asked {friend}. \"Because you were sad,\" said {hero}. After that, {friend} never boasted again.",
        "kindness is better than boasting",
    ),
    "ice": (
        "Winter came, and the lake was white with ice. {hero} wanted to slide on it. \"The ice is too thin,\" said {his} "
        "{helper}. But {hero} did not listen. {He} took {his} {colour} {thing} and stepped out. Crack! {hero} fell into the "
        "cold water. {friend} the {fkind} heard {him} and threw a rope. {hero} was [wet and cold|shaking], but safe. At home "
        "{he} drank hot soup. \"Next time I will listen,\" said {hero}.",
        "it is wise to listen",
    ),
    "market": (
        "{hero} went to the market with three coins. {He} wanted to buy a {colour} {thing}. On the way {he} met {friend} the "
        "{fkind}, who was [hungry|very hungry]. {hero} bought {food} for {friend} with one coin. Then {he} gave one coin to an "
        "old man. Now there was only one coin left, and the {thing} cost three. The seller had seen it all. \"Take the "
        "{thing},\" said the seller. \"A kind heart is worth more than coins.\" {hero} thanked the seller and ran home to the "
        "{place}.",
        "a kind heart is worth more than coins",
    ),
    "star": (
        "Every evening {hero} looked at the stars from the {place}. One star was [very small|smaller than the others]. \"It looks "
        "lonely,\" said {hero}. {He} lit a {colour} {thing} and held it up high. The small star blinked. \"It saw you!\" said "
        "{friend} the {fkind}. Every night they came back with the {thing}. And every night the small star shone a little "
        "brighter.",
        "a small light can cheer a friend far away",
    ),
    "robot": (
        "{hero} built a robot from a {colour} {thing} and some old tins. \"Hello,\" said the robot. \"What can I do?\" \"Please "
        "clean my room,\" said {hero}. The robot cleaned the room. Then it cleaned the {place}. Then it threw away {hero}'s "
        "shoes! \"Stop!\" cried {hero}. {friend} the {fkind} laughed. \"You must tell it when to stop,\" said {friend}. {hero} "
        "taught the robot to ask first. After that, the three of them ate {food} together, but the robot only watched.",
        "it is good to say exactly what we mean",
    ),
    "picnic": (
        "It was a {weather} day, and {hero} planned a picnic at the {place}. {He} packed {food} in a {colour} {thing}. But when "
        "{he} opened it, the {food} was gone! There were only crumbs. {hero} followed the crumbs through the grass. Behind a "
        "stone sat {friend} the {fkind} with a full mouth. \"I am sorry,\" said {friend}. \"I was so hungry.\" \"You could have "
        "asked,\" said {hero}. The next day {friend} brought {food} for two.",
        "it is better to ask than to take",
    ),
    "snowman": (
        "It had snowed all night. {hero} ran to the {place} and made a snowman. {He} gave it a {colour} {thing} and a carrot "
        "nose. \"It looks cold,\" said {friend} the {fkind}, and put a scarf around it. They danced around the snowman until it "
        "was dark. When spring came, the snowman melted. Only the {thing} was left in the grass. \"Do not be sad,\" said "
        "{hero}. \"Next winter we will make him again.\"",
        "good things come back",
    ),
    "letter": (
        "{hero}'s best friend {friend} had moved far away. {hero} missed {fhim} very much. So {he} sat down at the {place} and "
        "wrote a letter. {He} put the letter and a {colour} {thing} in a box and sent it. Days went by, and no answer came. "
        "{hero} was sad. Then one {weather} morning the box came back. Inside was a letter from {friend} and some {food}. \"I "
        "think of you every day,\" it said. {hero} read it three times.",
        "distance does not end a friendship",
    ),
    "paint": (
        "{hero} liked to paint. One day {he} painted {his} {thing} {colour}. Then {he} painted the door {colour}. Then {he} "
        "painted the cat! \"Oh, {hero}!\" said {his} {helper}. \"Not everything needs to be {colour}.\" {friend} the {fkind} came "
        "with water and soap. They washed the cat and the door. But the {thing} stayed {colour}, and everyone at the {place} "
        "said it was beautiful.",
        "even a good idea can go too far",
    ),
    "boat": (
        "{hero} and {friend} the {fkind} made a boat from wood. They painted it {colour} and used a {thing} as a flag. The boat "
        "went down the river, past the {place}. Then the wind blew hard, and the boat turned round and round. \"Hold on!\" "
        "shouted {hero}. {He} pulled the rope, and {friend} pulled too. At last they came to a small island. They ate {food} and "
        "waited. When the wind was quiet, they sailed home with the {thing} still on top.",
        "pulling together brings us home",
    ),
    "helper": (
        "{hero}'s {helper} was tired from work. \"I will help,\" said {hero}. {He} swept the floor. {He} fed the hens. {He} "
        "carried water from the {place} in a {colour} {thing}. It was hard work, and {his} arms hurt. {friend} the {fkind} saw "
        "{him} and helped to carry. When the {helper} woke up, everything was done. \"Who did all this?\" asked the {helper}. "
        "{hero} only smiled. That evening there was {food} for everyone.",
        "helping others makes us glad",
    ),
    "lie": (
        "{hero} liked jokes. One day {he} shouted, \"Help! A wolf is at the {place}!\" Everyone came running, but there was no "
        "wolf. {hero} laughed. The next day {he} did it again. Then a real wolf came and took {his} {colour} {thing}. \"Help! A "
        "wolf!\" cried {hero}. Nobody came. Only {friend} the {fkind} came, and the wolf ran away. \"Now I know,\" said {hero}. "
        "\"I will not lie again.\"",
        "nobody believes a liar",
    ),
    "bee": (
        "{hero} was picking flowers at the {place}. A small bee had fallen into {his} {colour} {thing}. It was full of water. "
        "{hero} was a little afraid, but {he} took a leaf and lifted the bee out. The bee dried its wings in the sun and flew "
        "away. A week later, {hero} and {friend} the {fkind} were lost in the forest. The bee came and flew in front of them. "
        "They followed it all the way home.",
        "a small kindness comes back",
    ),
    "train": (
        "{hero} was going to see {his} {helper} by train. {He} had a {colour} {thing} and a bag of {food}. {friend} the {fkind} "
        "sat next to {him}. \"Where are you going?\" asked {friend}. \"To the {place},\" said {hero}. They talked so much that "
        "they missed the stop! The next stop was the {place2}. \"What now?\" said {hero}. A kind driver let them ride back. "
        "{His} {helper} was waiting and waved with both hands.",
        "a mistake can be mended with a little help",
    ),
    "tooth": (
        "One morning {hero} had a loose tooth. It moved when {he} ate {food}. \"I do not want to lose it,\" said {hero}. {friend} "
        "the {fkind} said, \"A new one will grow.\" They went to the {place} to play with a {colour} {thing}. {hero} jumped and "
        "laughed, and out came the tooth! It did not hurt at all. {hero} put it in the {thing} and showed it to {his} {helper}. "
        "\"You are getting big,\" said the {helper}.",
        "growing up is not so scary",
    ),
}
ENDINGS = (
    "The end.",
    "{hero} learned that {lesson}.",
    "And {hero} never forgot that {lesson}.",
    "And so {hero} and {friend} became the best of friends.",
    "",
    "",
)
REQUESTS = (
    "Tell me a story about a {kind} and a {thing}.",
    "Tell me a story about a {kind} named {hero}.",
    "Write a short story about a {kind} named {hero} and a {colour} {thing}.",
    "Please tell me a story about {hero} and {friend}.",
    "Write a story about a {thing}.",
    "Can you tell me a story about a {trait} {kind}?",
    "I would like a story about a {kind} who goes to the {place}.",
    "Tell me a bedtime story about a {colour} {thing}.",
)
TOPIC_FREE = ("Tell me a story.", "Please tell me a short story.", "Can you tell me a story?", "I want a bedtime story.")
EXPLAIN = "[Tell me a story in which|Write a story that shows that] {lesson}."
LEADS = ("", "", "", "Of course! ", "Here is a story. ", "Sure. ")


def story(rng: random.Random, name: str | None = None) -> tuple[str, dict[str, str]]:
    """A story and its cast; the cast also holds the plot's name and lesson."""
    name = name or rng.choice(list(PLOTS))
    plot, lesson = PLOTS[name]
    cast = make_cast(rng) | {"plot": name, "lesson": lesson}
    text = expand(rng.choice(OPENINGS) + " " + plot, cast, rng)
    return (text + " " + expand(rng.choice(ENDINGS), cast, rng)).strip(), cast


def request(cast: dict[str, str], rng: random.Random) -> str:
    """An instruction that this cast's story answers."""
    kind = rng.random()
    if kind < 0.12:
        return rng.choice(TOPIC_FREE)
    if kind < 0.2:
        return expand(EXPLAIN, cast, rng)
    return expand(rng.choice(REQUESTS), cast, rng)


def question(text: str, cast: dict[str, str], rng: random.Random) -> tuple[str, str]:
    """A question about the story with the answer a reader would give."""
    pairs = [
        ("Who is the story about?", "The story is about {hero}."),
        ("What is the name of the {kind}?", "The name of the {kind} is {hero}."),
        ("What kind of person or animal is {hero}?", "{hero} is a {trait} {kind}."),
        ("Who is {hero}'s friend?", "The friend is {friend}."),
    ]
    if "{colour} {thing}" in PLOTS[cast["plot"]][0]:
        pairs += [("What colour is the {thing}?", "The {thing} is {colour}.")] * 2
    if cast["lesson"] in text:
        pairs.append(("What did {hero} learn?", "{hero} learned that {lesson}."))
    if "{food}" in PLOTS[cast["plot"]][0]:
        pairs.append(("What food is in the story?", "The food in the story is {food}."))
    asked, answer = rng.choice(pairs)
    return expand(asked, cast, rng), expand(answer, cast, rng)


def continuation(text: str, rng: random.Random) -> tuple[str, str]:
    """A request to go on with a story, and the rest of it."""
    sentences = text.split(". ")
    cut = rng.randint(1, max(1, len(sentences) // 2))
    start = ". ".join(sentences[:cut]) + "."
    return "Continue this story: " + start, ". ".join(sentences[cut:])

