#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The shared library exports exactly exports.txt, under the version nodes named there, and is linked as an embeddable
# library must be: soname, no unload, bound at load, no static TLS, no text relocations, no run path, few needs.
# Usage: exports_test.sh SOURCE_DIR LIBRARY SANITIZERS CUDA (ON or OFF)
set -euo pipefail
source_dir=$1 library=$2 sanitizers=$3 cuda=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nm -D --defined-only "$library" | awk '$2 != "A" {print $3}' | sort >"$work/exported"
sort "$source_dir/tests/api/exports.txt" >"$work/wanted"
diff "$work/wanted" "$work/exported" || { echo "exports.txt (<) and the library (>) differ" >&2; exit 1; }

dynamic=$(readelf -dW "$library")
fail() {
  echo "$1" >&2
  echo "$dynamic" >&2
  exit 1
}
grep -q 'SONAME.*\[libmoelora.so.0\]' <<<"$dynamic" || fail "the soname is not libmoelora.so.0"
grep -q 'FLAGS_1.*NODELETE' <<<"$dynamic" || fail "not linked with -z nodelete"
grep -q 'FLAGS_1.*NOW' <<<"$dynamic" || fail "not linked with -z now"
! grep -q 'STATIC_TLS' <<<"$dynamic" || fail "static TLS: dlopen may fail"
! grep -q 'TEXTREL' <<<"$dynamic" || fail "text relocations"
! grep -qE 'R(UN)?PATH' <<<"$dynamic" || fail "a run path"
readelf -lW "$library" | grep -q 'GNU_RELRO' || fail "no relro"
! readelf -lW "$library" | grep 'GNU_STACK' | grep -q 'RWE' || fail "an executable stack"
if [ -z "$sanitizers" ]; then
  # The C and C++ run times, PCRE2 for the regular expressions of adapters and tokenizers, utf8proc for
  # normal forms, Highway's choice of instruction set.
  sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' <<<"$dynamic" | sort >"$work/needed"
  printf '%s\n' ld-linux-x86-64.so.2 libc.so.6 libgcc_s.so.1 libhwy.so.1 libm.so.6 libpcre2-8.so.0 libstdc++.so.6 \
    libutf8proc.so.2 >"$work/allowed"
  extra=$(comm -23 "$work/needed" <(sort "$work/allowed"))
  [ -z "$extra" ] || fail "needs more than it may: $extra"
  # A library inside someone else's process does not end it, and does not write to its terminal.
  ends='abort|exit|_exit|quick_exit|atexit|__assert_fail|fork|system'
  # The static CUDA run time has a call of exit; our own sources are searched for such calls by tools/tidy.py.
  [ "$cuda" = OFF ] || ends=${ends/|exit|/|}
  speaks='printf|puts|putchar|perror|signal|sigaction|setlocale|chdir'
  banned=$(nm -D --undefined-only "$library" | awk '{print $NF}' | sed 's/@.*//' | grep -xE "$ends|$speaks" || true)
  [ -z "$banned" ] || fail "imports $banned"
fi
echo "$(wc -l <"$work/exported") symbols"
