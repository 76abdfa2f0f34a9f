#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# verify_smollm2.sh MOELORA CASE: converts the model where that has not been done (exit 77: skipped, no network), then
# verifies it one at a time and as a mixed batch.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
moelora=$1 case=$2
kind=dense
[ "$case" = smollm2_moe ] && kind=moe
"$root/tools/fetch_smollm2.sh" "$root/build/cache" "$kind" || exit $?
"$moelora" verify "$root/tests/data/cases/$case" --model "$root/build/cache/$case" &&
  "$moelora" verify "$root/tests/data/cases/$case" --model "$root/build/cache/$case" --mixed
