# shellcheck shell=bash
# ./dev setup: Debian packages, each with what needs it.

help setup <<'EOF'
./dev setup [build] [test] [lint] [fuzz] [models] [bench] [python] [--list] [--json]
Installs the packages that the purposes named (default: all) need and this machine lacks, with apt
as root or through sudo. Does nothing, quickly, where all are there. --list prints the packages and
what each is for. Other commands call it by themselves for what they need.
EOF

# Debian packages, each with what needs it: build (the library and the command), test, lint, fuzz,
# models, bench, python. (clang-14 lacks std::source_location.)
PACKAGES=(
  "g++ build" "cmake build" "ninja-build build" "git build"
  "libhwy-dev build" "libcli11-dev build" "nlohmann-json3-dev build" "libspdlog-dev build"
  "libfmt-dev build" "ccache test" "libucx-dev test" "iproute2 test" "nftables test" "libgtest-dev test" "libgmock-dev test"
  "librapidcheck-dev test" "gcovr test"
  "clang-format-14 lint" "shellcheck lint" "cppcheck lint"
  "clang-16 fuzz" "libclang-rt-16-dev fuzz" "libucx-dev fuzz" "spin models"
  "libbenchmark-dev bench" "libhwloc-dev bench" "openmpi-bin bench" "libopenmpi-dev bench"
  "libucx-dev bench" "ucx-utils bench" "iproute2 bench" "python3 bench" "python3-matplotlib bench"
  "python3-venv python" "python3-dev python"
)

installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

# Packages for the purposes given (all if none) that are not installed, one a line.
missing_packages() {
  local entry
  for entry in "${PACKAGES[@]}"; do
    if (($# == 0)) || [[ " $* " == *" ${entry#* } "* ]]; then
      installed "${entry% *}" || echo "${entry% *}"
    fi
  done
}

# apt-get as root, which waits for another apt (a machine's own daily one): by itself it does so for
# one of its three locks.
apt_get() {
  local sudo=() log=build/setup.log limit=$((SECONDS + 600))
  if ((EUID != 0)); then sudo=(sudo); fi
  mkdir -p build
  until "${sudo[@]}" env LC_ALL=C DEBIAN_FRONTEND=noninteractive \
    apt-get -o DPkg::Lock::Timeout=600 -o Acquire::Retries=5 -qq "$@" </dev/null >"$log" 2>&1; do
    if ! grep -q 'Could not get lock' "$log" || ((SECONDS > limit)); then
      cat "$log" >&2
      return 1
    fi
    sleep 1
  done
}

install_packages() {
  ((EUID == 0)) || command -v sudo >/dev/null || die "needs root or sudo to install: $*"
  printf 'Installing %s\n' "$*" >&2
  apt_get update
  apt_get install -y --no-install-recommends "$@"
}

# Installs what the purposes given still lack; returns at once where there is nothing to do.
ensure() {
  command -v dpkg-query >/dev/null ||
    { step "not Debian: expecting the libraries of './dev setup --list' to be here" && return; }
  local missing
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]} == 0)) || install_packages "${missing[@]}"
}

cmd_setup() {
  parse setup "--list --json" "$@"
  if [[ ${OPT_list:-false} == true ]]; then
    printf '%s\n' "${PACKAGES[@]}"
    return
  fi
  local missing
  mapfile -t missing < <(missing_packages "${ARGS[@]}")
  ensure "${ARGS[@]}"
  if [[ $JSON == true ]]; then
    json_object ok true installed "$(json_list "${missing[@]}")"
  elif ((${#missing[@]} == 0)); then
    step "everything is installed"
  fi
}
