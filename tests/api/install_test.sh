#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs into a scratch folder and builds the program at the top of moelora.h against it, in C and C++, once with
# pkg-config alone and once with find_package alone; runs each on a reference model; then moves the folder and does it
# again. Usage: install_test.sh SOURCE_DIR BUILD_DIR CC CXX MODEL_DIR ADAPTER_DIR
set -euo pipefail
source_dir=$1 build_dir=$2 cc=$3 cxx=$4 model=$5 adapter=$6
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

sed -n '/^ \*     #include <stdio.h>/,/^ \*     }$/p' "$source_dir/include/moelora.h" |
  sed 's/^ \*     \{0,1\}//; s/^ \*$//' >"$work/host.c"
cp "$work/host.c" "$work/host.cc"
cat >"$work/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(host LANGUAGES C CXX)
find_package(moelora 0.1 CONFIG REQUIRED)
add_executable(host_c host.c)
target_link_libraries(host_c PRIVATE moelora::moelora)
add_executable(host_cxx host.cc)
target_link_libraries(host_cxx PRIVATE moelora::moelora)
CMAKE

cmake --install "$build_dir" --prefix "$work/first" >"$work/install.log"
for file in include/moelora.h include/moelora_experimental.h; do
  [ -f "$work/first/$file" ] || { cat "$work/install.log"; echo "$file was not installed" >&2; exit 1; }
done

run() {
  local tokens
  tokens=$("$@" "$model" "$adapter")
  [ "$(wc -w <<<"$tokens")" -ge 1 ] || { echo "$1 answered '$tokens'" >&2; exit 1; }
  [ "${first_answer:=$tokens}" = "$tokens" ] || { echo "$1 answered otherwise: $tokens" >&2; exit 1; }
}

check() {
  local prefix=$1 libdir
  libdir=$(dirname "$(find "$prefix" -name moelora.pc)")/..
  export PKG_CONFIG_PATH=$libdir/pkgconfig
  [ "$(pkg-config --modversion moelora)" = 0.1.0 ]
  # Only our own library: what it needs is its own affair.
  [ "$(pkg-config --libs-only-l moelora | xargs)" = -lmoelora ]
  "$cc" -std=c99 "$work/host.c" -o "$prefix/by_pkg_config_c" $(pkg-config --cflags --libs moelora)
  "$cxx" -std=c++98 "$work/host.cc" -o "$prefix/by_pkg_config_cxx" $(pkg-config --cflags --libs moelora)
  LD_LIBRARY_PATH=$libdir run "$prefix/by_pkg_config_c"
  LD_LIBRARY_PATH=$libdir run "$prefix/by_pkg_config_cxx"
  env -u PKG_CONFIG_PATH cmake -S "$work" -B "$prefix/build" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" >"$work/cmake.log" || { cat "$work/cmake.log"; exit 1; }
  cmake --build "$prefix/build" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
  run "$prefix/build/host_c"
  run "$prefix/build/host_cxx"
  rm -rf "$prefix/build"
}

check "$work/first"
mv "$work/first" "$work/second"
check "$work/second"
echo "8 hosts built and run"
