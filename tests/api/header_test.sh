#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The public headers compile alone, twice included, in every C and C++ dialect that hosts use, without a warning and
# without padding, and every function in them has an entry in exports.txt. Usage: header_test.sh SOURCE_DIR CC CXX
set -euo pipefail
source_dir=$1 cc=$2 cxx=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

strict="-pedantic-errors -Wall -Wextra -Werror -Wpadded -I $source_dir/include"
count=0
for header in moelora.h moelora_experimental.h; do
  printf '#include <%s>\n#include <%s>\nint used(void);\nint used(void) { return MOELORA_E_INTERNAL; }\n' \
    "$header" "$header" >"$work/host.c"
  cp "$work/host.c" "$work/host.cc"
  for standard in c89 gnu89 c99 c11 c17; do
    "$cc" -std=$standard $strict -Wstrict-prototypes -Wmissing-prototypes -fsyntax-only "$work/host.c"
    count=$((count + 1))
  done
  for standard in c++98 c++11 c++14 c++17 c++20; do
    "$cxx" -std=$standard $strict -fsyntax-only "$work/host.cc"
    count=$((count + 1))
  done
done

# The flags have teeth: a struct with padding and a // comment must fail.
printf '#include <moelora.h>\nstruct bad { char a; int b; };\n' >"$work/bad.c"
if "$cc" -std=c99 $strict -fsyntax-only "$work/bad.c" 2>/dev/null; then
  echo "-Wpadded let a padded struct pass" >&2
  exit 1
fi
printf '// comment\n#include <moelora.h>\n' >"$work/bad.c"
if "$cc" -std=c89 $strict -fsyntax-only "$work/bad.c" 2>/dev/null; then
  echo "C89 let a // comment pass" >&2
  exit 1
fi

# The program at the top of the header compiles as it stands.
sed -n '/^ \*     #include <stdio.h>/,/^ \*     }$/p' "$source_dir/include/moelora.h" |
  sed 's/^ \*     \{0,1\}//; s/^ \*$//' >"$work/example.c"
[ "$(wc -l <"$work/example.c")" -ge 20 ]
"$cc" -std=c99 -Wall -Wextra -I "$source_dir/include" -fsyntax-only "$work/example.c"

cat "$source_dir"/include/moelora.h "$source_dir"/include/moelora_experimental.h |
  grep -o 'MOELORA_API [^;(]*(' | grep -o 'moelora_[a-z_0-9]*(' | tr -d '(' | sort >"$work/declared"
sed 's/@@.*//' "$source_dir/tests/api/exports.txt" | sort >"$work/exported"
diff "$work/declared" "$work/exported" || { echo "headers (<) and exports.txt (>) differ" >&2; exit 1; }
echo "$count compilations, $(wc -l <"$work/declared") functions"
