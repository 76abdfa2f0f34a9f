#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# repeat_test.sh SIM DIR: the same seed makes the same events, which depend on all that the engine did before them. If
# not, a fault that a seed has found cannot be found again.
set -euo pipefail
for shape in tiers many beside swap; do
  for run in 1 2; do
    "$1" --shape "$shape" --seed 11 --events 5000 --record "$2/repeat_$run.jsonl" >/dev/null
  done
  cmp "$2/repeat_1.jsonl" "$2/repeat_2.jsonl"
done
