#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""answer_smollm2.py MOELORA MODEL: the adapters that were trained for SmolLM2 answer as with transformers and PEFT.

MODEL is smollm2 or smollm2_moe; it is converted where that has not been done (exit 77: skipped, no network). All
prompts of tests/data/cases/MODEL_styles, base and adapter, go through `moelora run` as one batch. A token may differ
from the reference's, and with it what follows, only where the reference's two best logits are nearly equal.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEAR = 0.01  # the rounding of float32 is far below


def request(case):
    made = {"id": case["name"], "tokens": case["prompt"], "max_tokens": len(case["greedy"])}
    return made | ({"adapter": case["adapter"]} if case["adapter"] else {})


def fault(case, answer):
    """Why an answer is not the reference's, or None."""
    if "error" in answer:
        return answer["error"]["message"]
    tokens = answer["tokens"]
    for at, (wanted, margin) in enumerate(zip(case["greedy"], case["greedy_margin"])):
        if at >= len(tokens) or tokens[at] != wanted:
            return None if margin < NEAR else f"token {at} is {tokens[at:at + 1]}, the reference has {wanted}"
    return None


def main():
    moelora, model = sys.argv[1:]
    cache, case_dir = ROOT / "build" / "cache", ROOT / "tests" / "data" / "cases" / f"{model}_styles"
    fetched = subprocess.run([ROOT / "tools" / "fetch_smollm2.sh", cache, "moe" if model == "smollm2_moe" else "dense"])
    if fetched.returncode != 0:
        return fetched.returncode
    cases = json.loads((case_dir / "expected.json").read_text())["cases"]
    names = sorted({case["adapter"] for case in cases if case["adapter"]})
    flags = [part for name in names for part in ("--adapter", f"{name}={case_dir / 'adapters' / name}")]
    ran = subprocess.run([moelora, "run", "--model", cache / model, *flags, "--input", "-", "--output", "-"],
                         input="\n".join(json.dumps(request(case)) for case in cases) + "\n", text=True,
                         stdout=subprocess.PIPE)
    answers = {answer["id"]: answer for answer in map(json.loads, ran.stdout.splitlines())}
    faults = {case["name"]: fault(case, answers[case["name"]]) for case in cases}
    for name, why in faults.items():
        print(f"{name}: {why or 'as the reference'}")
    return ran.returncode or int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
