#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The texts of a reference case through the command: case_texts.py MOELORA CASE_DIR

Every prompt goes in as text and must become the reference's tokens; what comes back must be the reference's tokens and
its text. A token may differ, and what follows it, only where the reference itself has a near-tie; then the text up to
there is compared."""

import json
import subprocess
import sys

NEAR_TIE = 1e-3  # as `moelora verify` has it in fp32

moelora, folder = sys.argv[1:3]
with open(f"{folder}/expected.json", encoding="utf-8") as file:
    expected = json.load(file)
questions, cases = expected["questions"], expected["cases"]
adapters = sorted({case["adapter"] for case in cases} - {None})
flags = ["--model", f"{folder}/model", "--threads", "1"]
for name in adapters:
    flags += ["--adapter", f"{name}={folder}/adapters/{name}"]
failures = []


def run(*arguments, stdin=""):
    result = subprocess.run([moelora, *arguments], input=stdin, capture_output=True, text=True, timeout=300)
    if result.returncode != 0:
        sys.exit(f"{' '.join(arguments)}: exit {result.returncode}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    return result.stdout


def compare(where, case, answer):
    """True if all of it is equal."""
    tokens, wanted = answer["tokens"], case["greedy"]
    differ = next((i for i, token in enumerate(wanted) if tokens[i:i + 1] != [token]), None)
    if differ is None and len(tokens) == len(wanted) and answer["text"] == case["text"]:
        return True
    if differ is None or case["greedy_margin"][differ] > NEAR_TIE:
        failures.append(f"{where}: token {differ}\n  wanted {case['text']!r}\n  not    {answer['text']!r}")
        return False
    same = run("detokenize", "--model", f"{folder}/model", "--skip-special", stdin=json.dumps(wanted[:differ]))
    if not answer["text"].startswith(same) or not case["text"].startswith(same):
        failures.append(f"{where}: the text before a near-tie is {answer['text']!r}, not {same!r}")
    print(f"{where}: a near-tie of the reference at token {differ}")
    return False


def numbered_cases():
    """(number of the prompt, case), as the file has them: all prompts of one adapter, then of the next."""
    return [(at % len(questions), case) for at, case in enumerate(cases)]


# All at once by `run`, in which a prompt's tokens are counted.
lines = [{"id": f"{case['adapter']}.{prompt}", "prompt": questions[prompt], "max_tokens": len(case["greedy"]),
          "ignore_eos": True, **({"adapter": case["adapter"]} if case["adapter"] else {})}
         for prompt, case in numbered_cases()]
answers = run("run", *flags, stdin="".join(json.dumps(line) + "\n" for line in lines)).splitlines()
equal = 0
for (prompt, case), answer in zip(numbered_cases(), map(json.loads, answers), strict=True):
    where = f"{case['adapter'] or 'base'}, {questions[prompt]!r}"
    if answer["usage"]["prompt_tokens"] != len(case["prompt"]):
        failures.append(f"{where}: {answer['usage']['prompt_tokens']} tokens of the prompt, not {len(case['prompt'])}")
    equal += compare(where, case, answer)
print(f"run: {equal} of {len(cases)} texts are the reference's")

# One prompt by `generate`, and its tokens by `tokenize`.
length = ("--max-tokens", str(len(cases[0]["greedy"])), "--ignore-eos")
answers = map(json.loads, run("generate", *flags, *length, "--base", "--json", "--text", questions[0]).splitlines())
by_adapter = {case["adapter"] or "base": case for prompt, case in numbered_cases() if prompt == 0}
names = {answer["adapter"]: compare(f"generate, {answer['adapter']}", by_adapter[answer["adapter"]], answer)
         for answer in answers}
if set(names) != set(by_adapter):
    failures.append(f"generate answered with {sorted(names)}")
ids = run("tokenize", "--model", f"{folder}/model", stdin=questions[0]).split()
if list(map(int, ids)) != by_adapter["base"]["prompt"]:
    failures.append(f"tokenize: {ids}, not {by_adapter['base']['prompt']}")

print("\n".join(failures))
print(f"{len(failures)} failures")
sys.exit(1 if failures else 0)
