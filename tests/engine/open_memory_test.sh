#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A small model of gpt-oss-20b's layer shape (1.1 GB, written here and removed again) opens within its packed size
# + 10 %. Usage: open_memory_test.sh SOURCE_DIR OPEN_MEMORY WORK_DIR
# The whole model, by hand: tools/make_gpt_oss.py DIR && open_memory DIR [cuda]
set -euo pipefail
dir=$3/gpt_oss_2_layers
trap 'rm -rf "$dir"' EXIT
"$1"/tools/make_gpt_oss.py "$dir" --layers 2 --vocab 16384 --shard-gb 0.4
"$2" "$dir" cpu
