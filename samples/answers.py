#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Requests of a reference case for `moelora run`, and its answers side by side. Called by samples/smollm2.sh.

  answers.py requests CASE_DIR ADAPTER,...             JSON lines: the first four prompts, base and each adapter
  answers.py show CASE_DIR ANSWERS [TOKENIZER_JSON]    a table; token ids where there is no tokenizer
"""

import json
import shutil
import sys
import textwrap

NUM_PROMPTS = 4


def read_case(folder):
    with open(f"{folder}/expected.json", encoding="utf-8") as file:
        expected = json.load(file)
    by_adapter = {}
    for case in expected["cases"]:
        by_adapter.setdefault(case["adapter"] or "base", []).append(case)
    return expected.get("questions"), by_adapter


def requests(folder, adapters):
    questions, by_adapter = read_case(folder)
    for prompt in range(NUM_PROMPTS):
        for name in ["base"] + adapters:
            case = by_adapter[name][prompt]
            request = {"id": f"{name}.{prompt}", "tokens": case["prompt"],
                       "max_tokens": len(case["greedy"])}
            if name != "base":
                request["adapter"] = name
            if questions is None:  # random weights: their eos means nothing
                request["ignore_eos"] = True
            print(json.dumps(request))


def show(folder, answers_path, tokenizer_path):
    questions, by_adapter = read_case(folder)
    with open(answers_path, encoding="utf-8") as file:
        answers = {answer["id"]: answer for answer in map(json.loads, file)}
    names = list(dict.fromkeys(key.rsplit(".", 1)[0] for key in answers))
    if tokenizer_path:
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(tokenizer_path)
        decode = tokenizer.decode
    else:
        def decode(tokens):
            return " ".join(map(str, tokens))
    width = max(20, (min(shutil.get_terminal_size((120, 40)).columns, 150) - 3 * len(names)) // len(names))
    equal = total = 0
    for prompt in range(NUM_PROMPTS):
        first = by_adapter["base"][prompt]["prompt"]
        print(f"\n{questions[prompt] if questions else 'prompt: ' + decode(first)[:100]}")
        columns = []
        for name in names:
            answer, case = answers[f"{name}.{prompt}"], by_adapter[name][prompt]
            if "error" in answer:
                columns.append([f"{name}:"] + textwrap.wrap("error: " + answer["error"]["message"], width))
            else:
                same = answer["tokens"] == case["greedy"]
                equal += same
                text = decode(answer["tokens"])
                lines = [line for part in text.splitlines() for line in textwrap.wrap(part, width)]
                columns.append([f"{name}:"] + lines + ([] if same else ["(NOT the reference's)"]))
            total += 1
        for row in range(max(map(len, columns))):
            print("  " + " | ".join((column[row] if row < len(column) else "").ljust(width) for column in columns))
    print(f"\n{equal} of {total} answers are the reference's, token by token")
    return 0 if equal == total else 1


def main():
    arguments = sys.argv[1:]
    if len(arguments) == 3 and arguments[0] == "requests":
        requests(arguments[1], arguments[2].split(","))
        return 0
    if len(arguments) in (3, 4) and arguments[0] == "show":
        return show(arguments[1], arguments[2], arguments[3] if len(arguments) == 4 else None)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
