# SPDX-License-Identifier: Apache-2.0
# Sourced by samples/run.sh, samples/smollm2.sh and tests/run.sh: install_packages installs what of its arguments is
# missing, as root or through sudo, on Debian (12 or later) and its relatives. Elsewhere it says what is expected and
# goes on: CMake names what it does not find. build_samples is what the two samples have in common.

BUILD_PACKAGES="cmake ninja-build g++ pkg-config ccache nlohmann-json3-dev libfmt-dev libpcre2-dev
  libutf8proc-dev libtomlplusplus-dev libhwy-dev libcli11-dev python3 python3-venv ca-certificates"
TEST_PACKAGES="catch2"
# Opened at run time where present; the library falls back to the C allocator without it.
OPTIONAL_PACKAGES="libmimalloc2.0"

say() { printf '== %s\n' "$*"; }

install_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "not a Debian system: expecting the equivalents of: $(echo "$@" | tr -s ' \n' ' ')"
    return 0
  fi
  local missing="" package
  for package in "$@"; do
    dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing="$missing $package"
  done
  if [ -z "$missing" ]; then
    say "packages: all present"
    return 0
  fi
  local root=""
  if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "error: missing packages ($missing ): run as root, or install sudo" >&2
      return 1
    fi
    root="sudo"
  fi
  say "installing packages:$missing"
  $root env DEBIAN_FRONTEND=noninteractive apt-get -q update &&
    $root env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $missing
}

# Jobs of a build: one a core, as far as 1.5 GB of memory each reach.
build_jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable/ {print int($2 / 1500000)}' /proc/meminfo)
  [ "${memory:-1}" -ge 1 ] || memory=1
  [ "$cores" -le "$memory" ] && echo "$cores" || echo "$memory"
}

# build_samples ROOT BUILD DEVICE: packages, then library, command and samples without the tests; CUDA for DEVICE cuda.
build_samples() {
  local root=$1 build=$2 cuda=OFF jobs
  case $3 in cuda*) cuda=ON ;; esac
  install_packages $BUILD_PACKAGES $OPTIONAL_PACKAGES
  jobs=$(build_jobs)
  say "building in $build with $jobs jobs"
  mkdir -p "$build"
  cmake -G Ninja -S "$root" -B "$build" -DMOELORA_CUDA=$cuda -DMOELORA_TESTS=OFF >"$build/configure.log" 2>&1 ||
    { cat "$build/configure.log"; return 1; }
  cmake --build "$build" -j "$jobs"
}
