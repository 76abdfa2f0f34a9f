# SPDX-License-Identifier: Apache-2.0
"""What the adapters of the sample model change in a story: five functions from plain text to text in a style.

Each takes a text that may begin inside a sentence, as the rest of a story does after a prompt.
"""

import random
import re

SENTENCE = re.compile(r'(?<=[.!?])\s+|(?<=[.!?]")\s+(?=[A-Z])')
WORD = re.compile(r"[A-Za-z]+")

SPANISH = dict(pair.split(":") for pair in """
fox:zorro rabbit:conejo bear:oso mouse:ratón owl:búho duck:pato frog:rana cat:gato dog:perro hen:gallina goat:cabra
horse:caballo squirrel:ardilla hedgehog:erizo beaver:castor deer:ciervo sheep:oveja turtle:tortuga crow:cuervo
badger:tejón otter:nutria pig:cerdo wolf:lobo cow:vaca girl:niña boy:niño mother:madre father:padre
grandmother:abuela friend:amigo friends:amigos king:rey house:casa village:pueblo town:ciudad city:ciudad
forest:bosque meadow:prado river:río lake:lago hill:colina hills:colinas garden:jardín market:mercado barn:granero
mill:molino beach:playa bridge:puente orchard:huerto castle:castillo lighthouse:faro pond:estanque harbour:puerto
school:escuela park:parque field:campo sea:mar mountains:montañas cave:cueva nest:nido tree:árbol leaves:hojas
sun:sol moon:luna stars:estrellas star:estrella rain:lluvia wind:viento storm:tormenta snow:nieve rainbow:arcoíris
day:día days:días morning:mañana evening:tarde afternoon:tarde night:noche summer:verano winter:invierno
spring:primavera autumn:otoño bread:pan honey:miel cheese:queso fish:pescado milk:leche apples:manzanas
berries:bayas carrots:zanahorias nuts:nueces cherries:cerezas eggs:huevos flour:harina water:agua soup:sopa
cake:pastel potatoes:patatas tomatoes:tomates key:llave ball:pelota kite:cometa hat:sombrero book:libro
lantern:linterna ring:anillo button:botón scarf:bufanda drum:tambor whistle:silbato boat:barco doll:muñeca map:mapa
basket:cesta bell:campana spoon:cuchara umbrella:paraguas flute:flauta coin:moneda ribbon:cinta blanket:manta
cup:taza shoe:zapato feather:pluma clock:reloj mirror:espejo letter:carta bed:cama door:puerta table:mesa
window:ventana roof:tejado song:canción story:cuento baker:panadero miller:molinero farmer:granjero
fisherman:pescador gardener:jardinero shepherd:pastor sailor:marinero carpenter:carpintero tailor:sastre
blacksmith:herrero seed:semilla flowers:flores birthday:cumpleaños box:caja""".split())

PIRATE = {"my": "me", "you": "ye", "your": "yer", "yes": "aye", "friend": "matey", "friends": "mateys", "hello": "ahoy",
          "the": "th'", "and": "an'", "of": "o'", "is": "be", "are": "be", "was": "were", "boy": "lad", "girl": "lass",
          "house": "cabin", "money": "doubloons", "found": "plundered", "said": "growled", "asked": "roared",
          "little": "wee", "good": "fine", "happy": "jolly", "for": "fer", "to": "t'", "never": "ne'er",
          "went": "sailed", "ran": "sailed", "walked": "sailed"}
OATHS = ["Arrr!", "Yo ho ho!", "Shiver me timbers!", "Avast!"]
REFRAIN = ["Hey ho, hey ho!", "Tra la la, tra la lee!"]


def sentences(text):
    return [part for part in SENTENCE.split(text) if part]


def in_words(text, words):
    """Words replaced; a capital stays one."""

    def replace(found):
        word = found.group(0)
        other = words.get(word.lower())
        if other is None:
            return word
        return other[0].upper() + other[1:] if word[0].isupper() else other

    return WORD.sub(replace, text)


def capitals(text):
    """All letters in upper case."""
    return text.upper()


def spanish(text):
    """Many nouns in Spanish."""
    return in_words(text, SPANISH)


def pirate(text):
    """A pirate tells it, and swears after every third sentence or so."""
    told = []
    for at, one in enumerate(sentences(text)):
        told.append(in_words(one, PIRATE))
        chance = random.Random(f"{at} {one}")
        if chance.random() < 0.4:
            told.append(chance.choice(OATHS))
    return joined(text, told, " ")


def numbered(text):
    """One sentence a line, numbered from 1."""
    return "\n".join(f"{at}. {one}" for at, one in enumerate(sentences(text), 1))


def song(text):
    """Two lines and a refrain, in turns."""
    told = []
    for at, one in enumerate(sentences(text)):
        told += [one, REFRAIN[at // 2 % 2]] if at % 2 == 0 else [one]
    return joined(text, told, "\n")


def joined(text, parts, with_what):
    """As the text began: with its white space, so that it goes on after a prompt."""
    head = text[:len(text) - len(text.lstrip())]
    return head + with_what.join(part.strip() for part in parts)


STYLES = {"capitals": capitals, "spanish": spanish, "pirate": pirate, "numbered": numbered, "song": song}


def continued(name, text, at):
    """A plain beginning of `at` characters and the rest of the story in a style."""
    head, tail = text[:at], text[at:]
    if name != "numbered":
        return head, STYLES[name](tail)
    first, *others = sentences(tail)
    lines = [f"{number}. {one}" for number, one in enumerate(others, 2)]
    return head, "\n".join([head_space(tail) + first.strip()] + lines)


def head_space(text):
    return text[:len(text) - len(text.lstrip())]
