#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job, from nothing but a shell and root (or sudo) on Debian 12: installs packages, builds, and lets a small
# model tell stories with five adapters at once; see samples/demo.cc. Model and adapters are part of the repository: the
# network is needed for packages only. Works from any folder and again when run twice; exits 1 if something that the
# demo says does not hold.
#
#   samples/run.sh [--build DIR] [--device cpu|cuda] [--threads N]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/tools/debian_packages.sh"

build="$root/build/release" device=cpu threads=1
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=$2; shift 2 ;;
    --device) device=$2; shift 2 ;;
    --threads) threads=$2; shift 2 ;;
    -h | --help) sed -n '3,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "samples/run.sh: unknown option '$1' (--build DIR, --device cpu|cuda, --threads N)" >&2; exit 2 ;;
  esac
done

build_samples "$root" "$build" "$device"
"$build/bin/moelora_demo" "$root/samples/models/tiny-moe" "$root/samples/adapters" --device "$device" \
  --threads "$threads"
say "by hand, in $root:"
cat <<END
   $build/bin/moelora generate --model samples/models/tiny-moe --max-tokens 100 --base \\
     --adapter samples/adapters/pirate --text "Once upon a time, a little fox"
END
