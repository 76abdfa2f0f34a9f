#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing (Debian 12: root or sudo), builds everything and runs every test; prints the totals and
# exits 1 if a test failed. Works from any folder and again when run twice. With CUDA where nvcc exists.
#
#   tests/run.sh [--sanitize address,undefined|thread] [--cuda AUTO|ON|OFF] [--cuda-architectures LIST]
#                [--targets "NAME..."] [--build DIR] [--jobs N] [ctest option...]
#
# The last line is "N passed, N failed, N skipped". Skipped are tests without what they need (network, GPU).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/tools/debian_packages.sh"

sanitize="" cuda=AUTO architectures="" targets="" build="" jobs=""
while [ $# -gt 0 ]; do
  case $1 in
    --sanitize) sanitize=$2; shift 2 ;;
    --cuda) cuda=$2; shift 2 ;;
    --cuda-architectures) architectures=$2; shift 2 ;;
    --targets) targets=$2; shift 2 ;;  # instead of everything; the tests chosen must need no others
    --build) build=$2; shift 2 ;;
    --jobs) jobs=$2; shift 2 ;;
    -h | --help) sed -n '3,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) break ;;
  esac
done
case $sanitize in
  "") default_build=tests ;;
  address,undefined) default_build=asan ;;
  thread) default_build=tsan ;;
  *) echo "tests/run.sh: --sanitize takes 'address,undefined' or 'thread', not '$sanitize'" >&2; exit 2 ;;
esac
[ -n "$build" ] || build="$root/build/$default_build"

install_packages $BUILD_PACKAGES $TEST_PACKAGES $OPTIONAL_PACKAGES
[ -n "$jobs" ] || jobs=$(build_jobs)

say "configuring $build (CUDA $cuda${sanitize:+, sanitizers $sanitize})"
mkdir -p "$build"
cmake -G Ninja -S "$root" -B "$build" -DMOELORA_CUDA="$cuda" -DMOELORA_SANITIZE="$sanitize" -DMOELORA_TESTS=ON \
  -DMOELORA_CLI=ON ${architectures:+-DCMAKE_CUDA_ARCHITECTURES="$architectures"} >"$build/configure.log" 2>&1 ||
  { cat "$build/configure.log"; exit 1; }
grep -E '^-- moelora:' "$build/configure.log" || true
say "building with $jobs jobs"
cmake --build "$build" -j "$jobs" ${targets:+--target $targets}

say "running the tests"
# A leak of a library that we do not own would be listed here, with its reason.
export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=0:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}"
junit="$build/tests.xml"
rm -f "$junit"
ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$jobs" --output-junit "$junit" "$@" || true
[ -e "$junit" ] || { echo "error: ctest wrote no results" >&2; exit 1; }

count() { sed -n "s/.*\\b$1=\"\\([0-9]*\\)\".*/\\1/p" "$junit" | head -n 1; }
tests=$(count tests) failed=$(count failures)
skipped=$(($(count skipped) + $(count disabled)))
echo "$((tests - failed - skipped)) passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
