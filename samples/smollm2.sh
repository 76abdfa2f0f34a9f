#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A model that others trained, from nothing but a shell and root (or sudo) on Debian 12: installs packages, builds, gets
# SmolLM2-135M-Instruct (dense, and the same upcycled to 4 experts), and answers four questions with the base and with
# adapters, all in one batch a model, the texts side by side. Works from any folder and again when run twice.
# Without a network it says so and answers the prompts of a small reference case instead.
#
#   samples/smollm2.sh [--build DIR] [--device cpu|cuda]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/tools/debian_packages.sh"

build="$root/build/release" device=""
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=$2; shift 2 ;;
    --device) device=$2; shift 2 ;;
    -h | --help) sed -n '3,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "samples/smollm2.sh: unknown option '$1' (--build DIR, --device cpu|cuda)" >&2; exit 2 ;;
  esac
done

build_samples "$root" "$build" "$device"
moelora="$build/bin/moelora"
cases="$root/tests/data/cases"
cache="$root/build/cache"
failed=0

# answer TITLE CASE MODEL_DIR TOKENIZER ADAPTER...
answer() {
  local title=$1 case_dir=$2 model=$3 tokenizer=$4 python=python3 name flags=()
  shift 4
  printf '\n== %s: four questions x (base, %s) in one batch\n' "$title" "$(echo "$@" | sed 's/ /, /g')"
  for name in "$@"; do flags+=(--adapter "$name=$case_dir/adapters/$name"); done
  [ -z "$device" ] || flags+=(--device "$device")
  [ -z "$tokenizer" ] || python="$cache/venv/bin/python"
  "$python" "$root/samples/answers.py" requests "$case_dir" "$(echo "$@" | tr ' ' ',')" >"$build/requests.jsonl"
  "$moelora" run --model "$model" "${flags[@]}" --input "$build/requests.jsonl" --output "$build/answers.jsonl" ||
    failed=1
  "$python" "$root/samples/answers.py" show "$case_dir" "$build/answers.jsonl" ${tokenizer:+"$tokenizer"} || failed=1
}

say "getting SmolLM2-135M-Instruct (cached in $cache)"
got=0
"$root/tools/fetch_smollm2.sh" "$cache" || got=$?
if [ $got = 0 ]; then
  answer "SmolLM2-135M-Instruct" "$cases/smollm2" "$cache/smollm2" "$cache/smollm2/tokenizer.json" attn all_rslora
  answer "SmolLM2-135M-Instruct as a mixture of 4 experts" "$cases/smollm2_moe" "$cache/smollm2_moe" \
    "$cache/smollm2_moe/tokenizer.json" attn experts
  answer "SmolLM2-135M-Instruct, an adapter trained for it" "$cases/smollm2_styles" "$cache/smollm2" \
    "$cache/smollm2/tokenizer.json" smollm2-song
  answer "the mixture, an adapter trained for its experts" "$cases/smollm2_moe_styles" "$cache/smollm2_moe" \
    "$cache/smollm2_moe/tokenizer.json" smollm2-pirate
elif [ $got = 77 ]; then
  say "going on with a small reference case instead: random weights, so token ids and no sense in them"
  answer "reference case qwen3_moe" "$cases/qwen3_moe" "$cases/qwen3_moe/model" "" attn experts
else
  exit "$got"
fi
[ $failed = 0 ] && say "done" || { echo "error: an answer is missing or not the reference's (see above)" >&2; exit 1; }
