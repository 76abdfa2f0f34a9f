#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# text_bench.sh TEXT_BENCH: text to tokens on 1 MB of mixed text with SmolLM2's vocabulary, beside Hugging Face's
# `tokenizers` from PyPI, both on one thread, by turns. Exit 77 without network.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bench=$(realpath "$1")
"$root/tools/fetch_smollm2.sh" "$root/build/cache" dense || exit $?
cache="$root/build/cache"
text="$cache/mixed.txt"
export TOKENIZERS_PARALLELISM=false RAYON_NUM_THREADS=1
exec "$cache/venv/bin/python" - "$root" "$cache/smollm2" "$text" "$bench" <<'PYTHON'
import pathlib
import subprocess
import sys
import time

import tokenizers

root, model, path, bench = sys.argv[1:]
SIZE = 1_000_000

# A third each: prose and tables, source code, and short lines of many scripts.
SCRIPTS = ["El veloz murciélago hindú comía feliz cardillo y kiwi.", "Съешь же ещё этих мягких французских булок.",
           "いろはにほへと ちりぬるを わかよたれそ", "天地玄黃宇宙洪荒日月盈昃辰宿列張", "다람쥐 헌 쳇바퀴에 타고파 2024년 11월",
           "نص حكيم له سر قاطع وذو شأن عظيم", "עטלף אבק נס דרך מזגן",
           "Zwölf Boxkämpfer jagen 1.234,56 € über den Deich!",
           "กขฃคฅฆงจฉชซฌญ", "👩‍🚀🚀 ok 👍🏽 #1 → ½ × ∑"]


def third(parts):
    data = "".join(parts).encode()
    data = (data * (SIZE // 3 // max(len(data), 1) + 1))[:SIZE // 3]
    return data.decode(errors="ignore")


tree = pathlib.Path(root)
prose = [file.read_text() for file in sorted(tree.glob("*.md")) + sorted(tree.glob("*/README.md"))]
code = [file.read_text() for file in sorted((tree / "runtime").rglob("*.cc"))]
lines = [SCRIPTS[i % len(SCRIPTS)] + f" {i * i}\n" for i in range(500)]
text = third(prose) + third(code) + third(lines)
pathlib.Path(path).write_text(text, newline="")
size = len(text.encode())

tokenizer = tokenizers.Tokenizer.from_file(model + "/tokenizer.json")
start = time.perf_counter()
ids = tokenizer.encode(text).ids
cold = time.perf_counter() - start
best = best_lines = best_decode = 1e30
lines = text.splitlines(keepends=True)
for turn in range(3):
    ours = subprocess.run([bench, model, path, "2"], check=True, capture_output=True, text=True).stdout
    print(ours, end="")
    assert f"tokens {len(ids):>14}\n" in ours, "not as many tokens"
    end = time.perf_counter() + 2
    while time.perf_counter() < end:
        start = time.perf_counter()
        tokenizer.encode(text)
        best = min(best, time.perf_counter() - start)
    end = time.perf_counter() + 2
    while time.perf_counter() < end:
        start = time.perf_counter()
        tokenizer.encode_batch_fast(lines)  # its quickest way: short texts, no offsets
        best_lines = min(best_lines, time.perf_counter() - start)
    start = time.perf_counter()
    tokenizer.decode(ids, skip_special_tokens=False)
    best_decode = min(best_decode, time.perf_counter() - start)
print(f"tokenizers {tokenizers.__version__}, {len(ids)} tokens: encode {size / 1e6 / best:.2f} MB/s, "
      f"cold {size / 1e6 / cold:.2f} MB/s, by lines {size / 1e6 / best_lines:.2f} MB/s, "
      f"decode {size / 1e6 / best_decode:.2f} MB/s")
PYTHON
