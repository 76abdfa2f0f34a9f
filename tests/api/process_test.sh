#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs one mode of process_test: it must end by itself in time, with exit code 0, and the library may not have written
# a word. Usage: process_test.sh PROGRAM MODE LIBRARY MODEL_DIR
set -uo pipefail
output=$(mktemp)
trap 'rm -f "$output"' EXIT
timeout 300 "$@" >"$output" 2>&1
status=$?
cat "$output"
if [ $status != 0 ]; then
  echo "exit status $status"
  exit 1
fi
[ ! -s "$output" ] || { echo "something was written"; exit 1; }
