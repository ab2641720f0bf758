# shellcheck shell=bash
# ./dev build, demo, examples and bench: building, and running what was built.

help build <<'EOF'
./dev build [PRESET] [--prefix=DIR] [--shared]
Configures and builds PRESET (default dev) in build/PRESET, with ccache where it is installed, and
installs it to DIR if asked. --shared makes libtandem a shared library. `cmake --list-presets`
describes the presets.
EOF

# Address randomisation beyond what ThreadSanitizer's shadow memory allows makes its programs, and so
# the discovery of tests during the build, fail at random.
unrandomised() {
  if [[ $1 == tsan ]] && setarch -R true 2>/dev/null; then
    setarch -R "${@:2}"
  else
    "${@:2}"
  fi
}

# build_preset PRESET [CMAKE OPTIONS]
build_preset() {
  local preset=$1 options=("${@:2}")
  # Presets make warnings errors; a newer compiler than CI's may warn of what is not known here.
  if [[ -z ${CI:-} && $(c++ -dumpversion) != 12* ]]; then
    options+=(-DCMAKE_COMPILE_WARNING_AS_ERROR=OFF)
  fi
  if command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  fi
  step "build $preset"
  logged "build/$preset/configure.log" cmake --preset "$preset" "${options[@]}" &&
    logged "build/$preset/build.log" unrandomised "$preset" cmake --build --preset "$preset" -j "$JOBS"
}

cmd_build() {
  parse build "--prefix= --shared" "$@"
  ensure build
  local preset=${ARGS[0]:-dev} options=()
  case $preset in
    release) ;;
    bench) ensure bench ;;
    fuzz) ensure fuzz ;;
    *) ensure test ;;
  esac
  if [[ ${OPT_shared:-false} == true ]]; then options+=(-DBUILD_SHARED_LIBS=ON); fi
  build_preset "$preset" "${options[@]}"
  if [[ -n ${OPT_prefix:-} ]]; then
    step "install to $OPT_prefix"
    logged "build/$preset/install.log" cmake --install "build/$preset" --prefix "$OPT_prefix"
  fi
}

help demo <<'EOF'
./dev demo [--ranks=N] [--json]
Installs what is missing, builds the release preset and runs `tandem run-layer` on
data/moe_layer.safetensors over N ranks (default 8). Exit code 0 only if the result is right.
EOF

cmd_demo() {
  local data=data/moe_layer.safetensors
  parse demo "--json --ranks=" "$@"
  no_arguments demo
  ensure build
  build_preset release
  step "run-layer: a trained layer over ${OPT_ranks:-8} ranks"
  local options=()
  if [[ $JSON == true ]]; then options=(--json -); fi
  build/release/tools/tandem run-layer "$data" --ranks "${OPT_ranks:-8}" "${options[@]}"
}

help examples <<'EOF'
./dev examples [--shared]
Installs a release build of the library into a prefix under build/, builds examples/ against it
with find_package(tandem) alone, and runs them as tests.
EOF

cmd_examples() {
  parse examples "--shared" "$@"
  no_arguments examples
  ensure build test
  local kind=static options=(-DBUILD_SHARED_LIBS=OFF)
  if [[ ${OPT_shared:-false} == true ]]; then kind=shared options=(-DBUILD_SHARED_LIBS=ON); fi
  local root=$PWD/build/examples-$kind
  step "examples from an installed prefix ($kind library)"
  logged "$root/library.log" cmake -S . -B "$root/library" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DTANDEM_NET=ON -DTANDEM_TESTS=OFF -DTANDEM_TOOLS=OFF --install-prefix "$root/prefix" "${options[@]}"
  logged "$root/library.log" cmake --build "$root/library" -j "$JOBS" --target install
  logged "$root/configure.log" cmake -S examples -B "$root/build" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$root/prefix"
  logged "$root/build.log" cmake --build "$root/build" -j "$JOBS"
  ctest --test-dir "$root/build" --output-on-failure --no-tests=error | sed -n '/tests passed/,$p'
}

help bench <<'EOF'
./dev bench [cpu|gpu|net] [OPTIONS]
cpu: builds the bench preset and runs bench/run_cpu.py with OPTIONS (`./dev bench cpu --help` lists
them): dispatch and combine beside MPI and the machine's copy and write bandwidth.
gpu: builds the command with CUDA and runs `tandem bench --backend cuda` with OPTIONS.
net: as root, builds the bench preset and runs bench/run_net.py with OPTIONS (--help lists them): ranks
on two hosts that are network namespaces, beside MPI and ucx_perftest on the same links.
EOF

cmd_bench() {
  case ${1:-} in
    --help | -h) show_help bench && return ;;
    cpu) shift ;;
    net)
      shift
      ensure build bench
      build_preset bench
      step "bench net"
      bench/run_net.py --bin-dir build/bench/bench "$@"
      return
      ;;
    gpu)
      shift
      ensure build
      local root=build/bench-gpu
      step "build the command with CUDA"
      logged "$root/configure.log" cmake -S . -B "$root" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DTANDEM_CUDA=ON -DTANDEM_TESTS=OFF
      logged "$root/build.log" cmake --build "$root" -j "$JOBS" --target tandem_command
      "$root/tools/tandem" bench --backend cuda "$@"
      return
      ;;
    -* | '') ;;
    *) usage_error "unknown benchmark $1" bench ;;
  esac
  ensure build bench
  build_preset bench
  step "bench cpu"
  bench/run_cpu.py --bin-dir build/bench/bench "$@"
}
