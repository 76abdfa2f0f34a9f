# SPDX-License-Identifier: Apache-2.0
"""Short questions for the adapters of SmolLM2: templates times lists, and four that no adapter is trained on."""

import random

# Those of tests/data/cases/smollm2: what samples and tests ask, so never part of the training.
UNSEEN = ["What is the capital of France?", "Write one sentence about the sea.", "List three colours.",
          "Explain in two sentences why the sky is blue."]

COUNTRIES = ["Spain", "Italy", "Germany", "Japan", "China", "India", "Egypt", "Norway", "Sweden", "Finland", "Greece",
             "Portugal", "Poland", "Austria", "Ireland", "Russia", "Canada", "Mexico", "Brazil", "Argentina", "Peru",
             "Chile", "Cuba", "Kenya", "Turkey", "Hungary", "Denmark", "Belgium", "Australia", "Thailand"]
TOPICS = ["the moon", "the forest", "a river", "the wind", "winter", "summer", "a horse", "a cat", "a garden", "music",
          "bread", "the desert", "a mountain", "the night", "friendship", "a train", "books", "the rain", "an island",
          "a bridge", "the stars", "coffee", "a dog", "a market", "the harvest", "a storm", "a lighthouse", "school",
          "the kitchen", "a sailor", "dancing", "a clock", "a bicycle", "a whale", "the city", "spring"]
KINDS = ["animals", "fruits", "vegetables", "rivers", "planets", "tools", "musical instruments", "sports", "metals",
         "birds", "trees", "flowers", "languages", "insects", "games", "drinks", "kinds of weather", "shapes",
         "countries in Europe", "pieces of furniture", "fish", "spices", "months", "jobs", "hobbies"]
REASONS = ["grass is green", "ice floats on water", "leaves fall in autumn", "we sleep", "birds fly south",
           "bread rises", "the moon shines", "iron rusts", "we need water", "cats purr", "the sun is hot",
           "snow is white", "plants need light", "a ship floats", "we have seasons", "bees make honey",
           "milk turns sour", "thunder follows lightning", "people laugh", "fire needs air", "a compass points north",
           "dogs bark"]
THINGS = ["a volcano", "a computer", "gravity", "an atom", "a poem", "democracy", "a glacier", "oxygen", "a rainbow",
          "a planet", "a recipe", "a microscope", "money", "an engine", "electricity", "a museum", "a vitamin",
          "a novel", "a desert", "an orchestra", "a verb", "a triangle", "a fossil", "a library", "a battery"]
TASKS = ["boil an egg", "make tea", "clean a window", "plant a tree", "learn a language", "draw a circle",
         "wash a shirt", "bake a cake", "fix a flat tyre", "make a paper boat", "save money", "stay healthy",
         "write a letter", "find north", "sleep better", "train a dog", "cook rice", "catch a fish", "tie a knot"]

TEMPLATES = [
    ("What is the capital of {}?", COUNTRIES),
    ("Write one sentence about {}.", TOPICS),
    ("Tell me something about {}.", TOPICS),
    ("List three {}.", KINDS),
    ("Name two {}.", KINDS),
    ("Explain in two sentences why {}.", REASONS),
    ("In one sentence, why is it that {}?", REASONS),
    ("What is {}?", THINGS),
    ("Describe {} in a few words.", THINGS),
    ("How do I {}?", TASKS),
    ("Give me one tip: how can I {}?", TASKS),
]


def questions(seed=1):
    """All of them in a fixed random order."""
    made = [template.format(word) for template, words in TEMPLATES for word in words]
    random.Random(seed).shuffle(made)
    return [one for one in made if one not in UNSEEN]
