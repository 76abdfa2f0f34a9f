#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# smollm2_test.sh TEXT_TEST: the reference cases of SmolLM2's own vocabulary, after converting the model where that has
# not been done (exit 77: skipped, no network).
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"$root/tools/fetch_smollm2.sh" "$root/build/cache" dense || exit $?
MOELORA_SMOLLM2="$root/build/cache/smollm2" exec "$1" '[.smollm2]'
