# SPDX-License-Identifier: Apache-2.0
"""Short simple stories from a grammar: what the sample model learns to write.

`story(seed)` gives one story, always the same for a seed. Templates hold alternatives in brackets, [a|b], and slots
in
braces; a story has a hero, a friend, a thing, a place and a time that stay the same through it, and one of twelve
plots with causes, speech and an end. Facts are constant over all stories (what an animal eats, where it lives, which
tool mends what), so a model can learn them.
"""

import random
import re

GIRLS = """Anna Mia Lily Rosa Clara Emma Nora Ella Ida Lucy Sara Maya Zoe Ruby Hazel Alice Greta Nina Olive Wendy
Elsa Kate Molly Tina""".split()
BOYS = """Tom Ben Max Leo Sam Paul Otto Finn Jack Hugo Oscar Noah Peter Theo Victor Felix Emil Adam Simon Willy Karl
Henry Luke Tim""".split()

# animal: food, home, one thing it is known for
ANIMALS = {
    "fox": ("berries", "a den under the old oak", "clever"), "rabbit": ("carrots", "a burrow in the meadow", "quick"),
    "bear": ("honey", "a cave in the hills", "strong"), "mouse": ("cheese", "a hole behind the stove", "small"),
    "owl": ("mice", "a hollow tree", "wise"), "duck": ("bread", "a nest by the pond", "cheerful"),
    "frog": ("flies", "a pond full of lilies", "noisy"), "cat": ("fish", "a house by the sea", "proud"),
    "dog": ("bones", "a kennel behind the farm", "loyal"), "hen": ("corn", "a coop in the yard", "busy"),
    "goat": ("grass", "a stable on the hill", "stubborn"), "horse": ("oats", "a stable near the mill", "fast"),
    "squirrel": ("nuts", "a nest high in the pine", "nimble"), "hedgehog": ("apples", "a pile of leaves", "shy"),
    "beaver": ("bark", "a lodge in the river", "hard-working"),
    "deer": ("leaves", "a quiet part of the forest", "gentle"),
    "sheep": ("clover", "a fold in the valley", "soft"),
    "turtle": ("lettuce", "a garden with a high wall", "patient"),
    "crow": ("seeds", "a nest on the church tower", "curious"),
    "badger": ("roots", "a tunnel under the hill", "grumpy"),
    "otter": ("crabs", "a bank of the river", "playful"), "pig": ("potatoes", "a sty beside the barn", "hungry"),
}
WORKERS = {
    "baker": "bread", "miller": "flour", "farmer": "potatoes", "fisherman": "fish", "gardener": "tomatoes",
    "shepherd": "wool", "carpenter": "wood", "tailor": "cloth", "blacksmith": "iron", "sailor": "ropes",
}
THINGS = """key ball kite hat book lantern ring button scarf drum whistle boat doll map basket bell spoon mitten
umbrella compass flute coin ribbon blanket cup shoe feather clock mirror letter""".split()
COLOURS = "red blue green yellow white black brown silver golden purple orange grey".split()
LOOKS = "small big old new shiny pretty heavy round strange tiny lovely wonderful".split()


def in_list(text):
    return [" ".join(part.split()) for part in text.split(",")]


PLACES = in_list("""in the forest, in the meadow, by the river, by the lake, on the hill, in the village, at the
market, in the garden, near the barn, by the old mill, on the beach, near the bridge, in the orchard, by the castle,
near the lighthouse, by the pond, at the harbour, behind the school, in the park, at the edge of the field""")
HIDDEN = in_list("""under the bed, behind the door, under a pile of leaves, on top of the cupboard, in the tall
grass, inside a boot, between two stones, at the bottom of the basket, behind the stove, under the wooden bench, in
an empty flower pot, on a branch of the pear tree, in the pocket of an old coat, under the stairs""")
PLANTS = {"sunflower": "yellow petals", "pumpkin": "big orange pumpkins", "apple tree": "sweet red apples",
          "bean plant": "long green beans", "rose": "soft pink flowers", "cherry tree": "dark red cherries",
          "tomato plant": "round red tomatoes", "pear tree": "juicy pears", "strawberry": "sweet strawberries"}
# dish: what is missing, who has it
DISHES = {"apple pie": ("apples", "hedgehog"), "a cake": ("eggs", "hen"), "bread": ("flour", "miller"),
          "carrot soup": ("carrots", "rabbit"), "pancakes": ("milk", "cow"), "a honey cake": ("honey", "bear"),
          "fish soup": ("fish", "fisherman"), "potato soup": ("potatoes", "farmer"),
          "nut bread": ("nuts", "squirrel"),
          "tomato salad": ("tomatoes", "gardener"), "cheese rolls": ("cheese", "mouse"),
          "berry jam": ("berries", "fox")}
# broken thing: how it broke, tool, what it is mended with
REPAIRS = {"fence": ("the wind blew it down", "hammer", "new boards"),
           "roof": ("the storm made a hole in it", "ladder", "straw"),
           "boat": ("it hit a rock", "brush", "tar"), "chair": ("one leg broke", "saw", "a piece of wood"),
           "kite": ("it flew into a thorn bush", "needle", "strong thread"),
           "cart": ("it lost a wheel", "hammer", "a new wheel"),
           "bridge": ("the flood took it away", "saw", "long logs"),
           "window": ("a ball flew into it", "knife", "new glass"),
           "sail": ("it tore in the wind", "needle", "white cloth"), "bucket": ("it had a hole", "brush", "tar")}
FEARS = {"the dark": ("lit a little lamp", "the dark is only the day asleep"),
         "thunder": ("sang a loud song", "thunder is only a noise"),
         "deep water": ("held {his} hand", "the water will carry you"),
         "high places": ("went up first", "do not look down, look at me"),
         "the big dog": ("gave the dog a bone", "a dog that eats does not bite"),
         "strangers": ("stayed close to {him}", "a stranger is a friend you do not know yet"),
         "the cold wind": ("gave {him} a warm scarf", "the wind only wants to play")}
WEATHER = {"it began to rain": ("wet", "The sun came out and a rainbow stood over the hills."),
           "it began to snow": ("cold", "In the morning the whole world was white and quiet."),
           "a strong wind came up": ("tired", "At last the wind grew tired and lay down."),
           "a thick fog came down": ("lost", "Slowly the fog lifted, and they could see the road again."),
           "there was thunder and lightning": ("afraid", "The storm went away over the sea.")}
GAMES = "hide and seek|ball|with the kite|cards|tag|at being kings|by the water|music|with wooden boats".split("|")
TIMES = in_list("""one morning, one day, one evening, one sunny afternoon, one cold winter day, one spring morning,
one summer night, one autumn day, one rainy day, one windy afternoon, early one morning, late one evening""")

OPENINGS = [
    "once upon a time, {intro} lived in {home}.", "once upon a time there was {intro} who lived in {home}.",
    "{intro} lived in {home}.", "there once was {intro} who loved {food}.", "long ago, {intro} lived {place}.",
    "{A} was a [kind|{trait}|happy|curious|good] {kind} who lived in {home}.", "in {home} lived {intro}.",
    "once upon a time, {intro} [had a friend called {B}|lived {place} with {his} [mother|father|grandmother]].",
]
HABITS = [
    "{A} liked {food} more than anything else.", "every day {he} [walked|ran|went] to {bhome} to see {B}.",
    "{he} was very {trait}, and everyone knew it.", "{his} best friend was {bintro}.",
    "{he} had a {look} {colour} {thing} and was very proud of it.", "{A} and {B} often played {game} {place}.", "",
    "",
]
ENDINGS = [
    "{A} was [very |so |]happy.", "from that day on, {A} and {B} were the best of friends.",
    "that night {A} slept very well.", "and they [all |]lived happily ever after.",
    "{A} never forgot that day.", "they [laughed|sang|danced] until the moon came up.",
    "then they went home together, and {B} gave {A} some {food}.", "and that was the end of a very good day.",
    "{A} smiled all the way home.", "and when you walk {place} today, you can still hear them laugh.",
]
THANKS = ['"thank you, {B}!" said {A}.', '"thank you," said {A}. "you are a true friend."',

          '"you are very kind," said {A}.', '{A} [hugged|thanked] {B} and [gave {bhim} some {bfood}|danced with joy].']

def read_plots(text):
    """name -> (lines of the story, what the hero learns), from the form below."""
    plots = {}
    for line in text.strip().split("\n"):
        if line.startswith("  "):
            lines[-1] += " " + line.strip()
        elif line[:2] in ("- ", "= "):
            lines = plots[name][0 if line[0] == "-" else 1]
            lines.append(line[2:])
        else:
            name = line
            plots[name] = ([], [])
    return plots


# A plot: one or more sentences after each dash, and what the hero learns after an equals sign.
PLOTS = read_plots("""
lost
- {when} {A} could not find {his} {colour} {thing}.
- {he} looked {hidden}, but it was not there. [then {he} looked {hidden2}, but it was not there either.|]
- {A} [sat down and cried|was very sad|did not know what to do].
- "why are you [sad|crying], {A}?" asked {B}. "I have lost my {colour} {thing}," said {A}.
- "[do not worry|do not cry]," said {B}. "I will help you."
- they [searched|looked] everywhere[ {place}|]. [at last|after a long time|before sunset] {B} found the {thing}
  {hidden3}.
= it is good to ask for help
= a good friend is worth more than gold
found
- {when} {A} found a {look} {colour} {thing} {place}.
- "[whose {thing} is this|who has lost this {thing}]?" {he} [thought|said|asked].
- {he} [asked|went to] the {worker}, but the {worker} had never seen it.
- then {he} saw {B}, who was looking {hidden}. "[have you seen|did you see] my {thing}?" asked {B}.
- "here it is," said {A}, and gave {bhim} the {thing}.
- {B} was so glad that {bhe} gave {A} [some {food}|a {colour2} {thing2}|a big hug].
= it is best to be honest
storm
- {when} {A} and {B} were {place} when {weather}.
- soon they were {wet} and [could not go on|wanted to go home|could not see the way].
- "[where can we go|what shall we do]?" asked {B}. "come with me," said {A}. "I know a [safe|dry|warm] place."
- they ran to [the house of the {worker}|the old mill|a little hut|the barn]. [there was a fire|it was warm inside],
  and they ate [some |]{food}[ and drank hot milk|].
- {after}
= friends are warm like a fire
dish
- {when} {A} wanted to make {dish} for {B}, but {he} had no {missing}.
- {he} took {his} basket and went to the {owner}. "[please, |]can you give me some {missing}?" {he} asked.
- "yes," said the {owner}, "if you [help me first|bring me some water|sing me a song|sweep my yard]."
- {A} [did so|worked all morning|was glad to help], and the {owner} filled the basket with {missing}.
- then {he} made {dish}, and [it smelled wonderful|the whole house smelled good].
- when {B} came, they sat down at the table and ate until [nothing was left|they were full].
= food tastes best when it is shared
fear
- but {A} was afraid of {fear}.
- {when} {B} [wanted to play|asked {him} to play] {place}. "I cannot come," said {A}. "I am afraid of {fear}."
- {B} [did not laugh|smiled]. {bhe} {act}. "{saying}," said {bhe}.
- {A} [took a deep breath|closed {his} eyes and opened them again] and went with {bhim}. [first one step, then
  another.|]
- nothing bad happened. "look," said {B}, "you are very brave!"
- after that, {A} was not afraid of {fear} any more.
= even small people can be brave
quarrel
- {when} {A} and {B} found a {colour} {thing} {place}. "it is mine!" said {A}. "no, I saw it first!" said {B}.
- they pulled and pulled, [and the {thing} fell into the water|and the {thing} broke in two|and neither would let go].
- {B} went away and {A} was alone. [{he} had the {thing}, but no one to play with.|it was not fun to be alone.]
- in the evening {A} went to {bhome} and knocked. "I am sorry," {he} said. "let us share it."
- "I am sorry too," said {B}. [so they played {game} together.|and they were friends again.]
= it is better to share than to win
repair
- {when} {A} saw that the {broken} was broken, because {cause}.
- "who can mend the {broken}?" asked {A}. "[I can|I know how]," said {B}. "but we need a {tool} and {stuff}."
- {A} [borrowed|got] a {tool} from the {worker}, and {B} brought {stuff}.
- they worked [all day|until evening|very hard]. [{A} held the {broken} and {B} used the {tool}.|it was not easy.]
- at last the {broken} was as good as new. "[well done|we did it]!" said the {worker}.
= work is easy when friends help
journey
- {when} {A} wanted to see [the sea|the end of the rainbow|the big city|the snow on the mountains|where the river
  ends].
- {he} packed some {food} and a {thing} and [went off|set out]. {he} walked past {path} and past {path2}.
- on the way {he} met {B}. "where are you going?" asked {B}. "far away," said {A}. "[come with me!|will you come?]"
- they walked for [three days|seven days|a long time] and slept [under the stars|in the hay|under a tree].
- when they came there, it was [more beautiful than a dream|bigger than they had thought]. {A} found a {colour}
  {thing2} and took it home.
= the world is wide, but home is best
plant
- {when} {A} planted [a|one little] seed {place}. "what will it be?" asked {B}. "wait and see," said {A}.
- every day {he} gave it water. [first nothing happened.|{B} thought that it would never grow.]
- then a little green leaf came out of the ground. it grew and grew, [as high as the fence|as tall as {A}|day after
  day].
- in summer it was a fine {plant} with {fruit}.
- {A} [gave some to {B} and some to the {worker}|called {B}, and they sat down beside it|showed it to everyone].
= good things need time
birthday
- {when} it was the birthday of {B}. {A} wanted to give {bhim} something [special|nice|beautiful].
- {he} had no money, so {he} [made|painted|found] a {look} {colour} {thing} and put it into a {colour2} box.
- "happy birthday, {B}!" said {A}. {B} opened the box. "a {thing}!" {bhe} cried. "it is just what I wanted."
- there was {cake} and there were {bfood}, and [the {worker} played the flute|everybody sang|they played {game}].
= the best gifts are made by hand
trick
- {when} a hungry wolf came to {home}. "I will eat you up," said the wolf.
- {A} [was afraid, but {he} thought quickly|did not run away]. "I am too thin," {he} said. "wait until I have eaten
  some {food}."
- the wolf [sat down and waited|fell asleep under a tree]. then {A} called {B}, and {B} [came with a {thing}|made a
  loud noise|brought the {worker}].
- the wolf [ran away as fast as he could|jumped into the pond|ran into the forest] and never came back.
- "how {trait2} you are!" said {B}.
= a clever head is better than strong arms
sick
- {when} {B} was ill and had to stay in bed. {A} [was worried|heard of it and came at once].
- {he} brought {bhim} [hot soup|warm milk|some {bfood}] and a {colour} blanket. "{how}?" asked {A}.
- "my [head|throat|tummy] hurts," said {B}. so {A} told {bhim} a story about {story_of}.
- {A} came every day for [three days|a week]. then {B} got up and said, "I am well again!"
- they went out and played {game} {place}.
= a good friend is worth more than gold
""")

# May stand between any two sentences of a plot.
BETWEEN = [
    "the sun was shining.", "a little bird sang in a tree.", "it was very quiet {place}.",
    "the air smelled of {smell}.", "{B} laughed.",
    "{A} thought about it for a moment.", "nobody said a word.", "the {worker} waved to them.",
    "{A} ate some {food}.", "somewhere a bell rang.", "a {colour} butterfly flew by.", "{A} was a little tired.",
    "{B} sat down beside {him}.", "the sky was full of {clouds}.", "{A} was happy to have such a friend.",
]

ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{(\w+)\}")
SPEAKER = re.compile(r"((he|she) )?(said|asked|cried|thought)\b")


def character(rng, prefix):
    """Slots of a hero or friend: name, pronouns, how it is introduced, food and home."""
    girl = rng.random() < 0.5
    if rng.random() < 0.5:
        kind = rng.choice(list(ANIMALS))
        food, home, trait = ANIMALS[kind]
        adjective = rng.choice(["little", "young", "old", "brave", "funny", "friendly", trait])
        article = "an" if adjective[0] in "aeiou" else "a"
        if rng.random() < 0.35:
            name = rng.choice(GIRLS if girl else BOYS)
            intro = f"{article} {adjective} {kind} named {name}"
        else:
            name, intro = f"the {kind}", f"{article} {adjective} {kind}"
    else:
        kind, name = ("girl", rng.choice(GIRLS)) if girl else ("boy", rng.choice(BOYS))
        food = rng.choice(["bread", "cherries", "pancakes", "apples", "cheese", "honey", "nuts"])
        home = rng.choice(["a little house", "a white house by the sea", "a village in the valley", "an old mill",
                           "a house at the edge of the forest", "a small town"])
        trait = rng.choice(["brave", "clever", "kind", "curious", "cheerful", "careful"])
        intro = f"a {rng.choice(['little', 'young', 'brave', 'kind'])} {kind} named {name}"
    words = {"A": name, "kind": kind, "food": food, "home": home, "trait": trait, "intro": intro,
             "he": "she" if girl else "he", "him": "her" if girl else "him", "his": "her" if girl else "his"}
    return words if not prefix else {"B" if key == "A" else prefix + key: word for key, word in words.items()}


def two(rng, words):
    return rng.sample(words, 2)


def scene(rng):
    """All slots of one story."""
    slots = character(rng, "")
    while True:
        friend = character(rng, "b")
        if friend["B"] != slots["A"] and friend["bkind"] != slots["kind"] or friend["bkind"] in ("girl", "boy"):
            if friend["B"] != slots["A"]:
                break
    slots.update(friend)
    slots["thing"], slots["thing2"] = two(rng, THINGS)
    slots["colour"], slots["colour2"] = two(rng, COLOURS)
    slots["hidden"], slots["hidden2"], slots["hidden3"] = rng.sample(HIDDEN, 3)
    slots["path"], slots["path2"] = two(rng, ["the mill", "the castle", "the dark wood", "the lake", "the bridge",
                                              "the old church", "a field of flowers", "the farm"])
    slots.update(place=rng.choice(PLACES), look=rng.choice(LOOKS), game=rng.choice(GAMES), when=rng.choice(TIMES),
                 worker=rng.choice(list(WORKERS)), trait2=rng.choice(["clever", "brave", "wise"]),
                 cake=rng.choice(["a big cake", "apple pie", "a honey cake"]),
                 how=rng.choice(["how are you", "does it hurt"]),
                 smell=rng.choice(["hay", "rain", "flowers", "fresh bread", "the sea"]),
                 clouds=rng.choice(["little white clouds", "dark clouds", "stars", "swallows"]),
                 story_of=rng.choice(["a king and a dragon", "a ship on the sea", "a star that fell down",
                 "a giant"]))
    slots["dish"], (slots["missing"], slots["owner"]) = rng.choice(list(DISHES.items()))
    slots["broken"], (slots["cause"], slots["tool"], slots["stuff"]) = rng.choice(list(REPAIRS.items()))
    slots["fear"], (slots["act"], slots["saying"]) = rng.choice(list(FEARS.items()))
    slots["weather"], (slots["wet"], slots["after"]) = rng.choice(list(WEATHER.items()))
    slots["plant"], slots["fruit"] = rng.choice(list(PLANTS.items()))
    return slots


def expand(rng, template, slots):
    while "[" in template:
        template = ALTERNATIVES.sub(lambda found: rng.choice(found.group(1).split("|")), template)
    while "{" in template:
        template = SLOT.sub(lambda found: slots[found.group(1)], template)
    return template


def capitalise(text):
    """Upper case for the first letter of each sentence and of each speech, but not of a speech that goes on."""
    letters, inside, start = [], False, True
    for at, char in enumerate(text):
        if char.isalpha():
            char, start = (char.upper() if start else char), False
        elif char == '"':
            inside = not inside
            start = (start or text[at - 2:at] != ", ") if inside else start
        elif char in ".!?":
            after_speech = inside and text[at + 1:at + 2] == '"'
            start = not (after_speech and char != "." and SPEAKER.match(text, at + 3))
        letters.append(char)
    return "".join(letters)


def story(seed):
    """One story of 60 to 170 words in one paragraph."""
    rng = random.Random(seed)
    slots = scene(rng)
    plot, lessons = PLOTS[rng.choice(list(PLOTS))]
    lines = []
    if rng.random() < 0.7:
        lines += [rng.choice(OPENINGS), rng.choice(HABITS)]
    elif plot[0].startswith("but"):
        lines += [rng.choice(OPENINGS)]
    for line in plot:
        lines += [line] + ([rng.choice(BETWEEN)] if rng.random() < 0.2 else [])
    if rng.random() < 0.4:
        lines.append(rng.choice(THANKS))
    if rng.random() < 0.3:
        lines.append("{A} had learned that " + rng.choice(lessons) + ".")
    lines.append(rng.choice(ENDINGS))
    text = " ".join(filter(None, (expand(rng, line, slots).strip() for line in lines)))
    return capitalise(re.sub(r"  +", " ", text))


def stories(first, count):
    return [story(seed) for seed in range(first, first + count)]


if __name__ == "__main__":
    for one in stories(0, 10):
        print(one, end="\n\n")
