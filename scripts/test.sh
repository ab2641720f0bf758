# shellcheck shell=bash
# ./dev test and coverage.

help test <<'EOF'
./dev test [--preset=NAME,..] [--all] [--label=LABEL] [--filter=REGEX] [--ucx=VERSION] [--json]
./dev test --python [--filter=EXPRESSION]
./dev test --gpu
Builds NAME (default dev) and runs its tests; --all: dev, asan-ubsan and tsan. --label and --filter
choose tests by label (docs/testing.md) and by name. In a pipe only failures and ctest's closing
lines are printed; everything is in build/NAME/test.log.
--ucx: runs them on this version of UCX, from PyPI's wheel libucx-cu12, in place of Debian's.
--python: installs the package into .venv, with the array frameworks that its tests need (about a
gigabyte, once), checks python/ with ruff and mypy, and runs pytest; --filter is pytest's -k.
--gpu: builds the preset cuda and runs all checks that need a GPU (bench/gpu.sh); their output is in
build/cuda/gpu.
EOF

# An index that answers slowly for a while is waited for: pip gives up after 15 s of silence, and does
# not ask again for a file that stops half-way.
virtual_environment() {
  export PIP_DEFAULT_TIMEOUT=120 PIP_RETRIES=10
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
}

# fetch_ucx VERSION FOLDER: the wheel's libraries, in FOLDER/libucx/lib.
fetch_ucx() {
  ensure python && virtual_environment || return
  rm -rf "$2.part"
  .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target "$2.part" \
    "libucx-cu12==$1" && mv "$2.part" "$2"
}

# The folder of libraries of --ucx; fails where the preset's programs would not use them.
ucx_libraries() {
  local preset=$1 version=$OPT_ucx folder=$PWD/build/ucx/$OPT_ucx told
  [[ -d $folder ]] || logged "build/ucx/$version.log" fetch_ucx "$version" "$folder" >&2 || return
  told=$(LD_LIBRARY_PATH=$folder/libucx/lib "build/$preset/tools/tandem" info)
  [[ $told == *"UCX ${version%.post*}"* ]] || die "the tests do not use UCX $version: $told"
  echo "$folder/libucx/lib"
}

# run_ctest PRESET [CTEST OPTIONS]: ctest's closing lines, and the output of tests that failed.
run_ctest() {
  local preset=$1 log=build/$1/test.log status=0 libraries
  local ctest=(unrandomised "$1" env)
  shift
  if [[ -n ${OPT_ucx:-} ]]; then
    libraries=$(ucx_libraries "$preset") || return
    ctest+=("LD_LIBRARY_PATH=$libraries")
  fi
  ctest+=(ctest --preset "$preset" -j "$JOBS")
  step "test $preset${OPT_ucx:+ on UCX $OPT_ucx}"
  if [[ -t 1 && $JSON == false ]]; then
    "${ctest[@]}" --progress "$@"
    return
  fi
  "${ctest[@]}" "$@" >"$log" 2>&1 || status=$?
  local shown=1  # a descriptor: opening /dev/stdout would truncate the file that it may be
  if [[ $JSON == true ]]; then shown=2; fi
  {
    ((status == 0)) || grep -avE '^ *(Start +[0-9]+:|[0-9]+/[0-9]+ Test .* Passed )' "$log" |
      sed '/tests passed,/,$d'
    sed -n '/tests passed,/,$p' "$log"
  } >&"$shown"
  return "$status"
}

# Counts from a ctest log: "PASSED FAILED".
ctest_counts() {
  sed -nE 's/.*tests passed, ([0-9]+) tests failed out of ([0-9]+).*/\1 \2/p' "build/$1/test.log" |
    { read -r failed total && echo "$((total - failed)) $failed"; }
}

# test_preset PRESET [CTEST OPTIONS]: adds to RESULTS what came out.
test_preset() {
  local preset=$1 begin=$SECONDS ok=true passed=0 failed=0
  build_preset "$preset" || ok=false
  if [[ $ok == true ]]; then
    run_ctest "$@" || ok=false
    if [[ $JSON == true ]]; then read -r passed failed < <(ctest_counts "$preset") || true; fi
  fi
  RESULTS+=("$(json_object preset "\"$preset\"" ok "$ok" passed "${passed:-0}" \
    failed "${failed:-0}" seconds "$((SECONDS - begin))")")
  [[ $ok == true ]]
}

# PyTorch's wheel wants 2 GB of CUDA libraries. Where the toolkit has them, the three that it lacks
# are enough.
install_torch() {
  local pip=(.venv/bin/python -m pip install -q) torch=torch==2.11.0 libraries
  if compgen -G '.venv/lib/python*/site-packages/torch' >/dev/null; then return; fi
  libraries=$(ldconfig -p)
  if [[ $libraries == *libcudnn.so.9* && $libraries == *libcublas.so.13* ]]; then
    "${pip[@]}" --no-deps "$torch" nvidia-cusparselt-cu13==0.8.0 nvidia-nvshmem-cu13==3.4.5 \
      nvidia-cufile
  else
    "${pip[@]}" "$torch"
  fi
}

# The package and what its tests need, in .venv; cheap where nothing has changed.
python_environment() {
  ensure build python && virtual_environment || return
  .venv/bin/python -m pip install -q --disable-pip-version-check -r python/requirements-test.txt || return
  install_torch || return
  if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
  CMAKE_BUILD_PARALLEL_LEVEL=$JOBS .venv/bin/python -m pip install -q --no-build-isolation --no-deps \
    --force-reinstall .
}

test_python() {
  step "tandem_ep and array frameworks into .venv"
  logged build/python/install.log python_environment
  step "ruff, mypy"
  .venv/bin/ruff format -q --check python
  .venv/bin/ruff check -q python
  .venv/bin/mypy
  step "pytest"
  # From another folder: what is tested is what is installed.
  local filter=()
  if [[ -n ${OPT_filter:-} ]]; then filter=(-k "$OPT_filter"); fi
  (cd build/python && timeout --foreground 3600 ../../.venv/bin/python -m pytest -q -c ../../pyproject.toml \
    --rootdir ../.. ../../python/tests "${filter[@]}")
}

cmd_test() {
  parse test "--all --gpu --preset= --label= --filter= --python --ucx= --json" "$@"
  no_arguments test
  if [[ ${OPT_python:-false} == true ]]; then
    test_python
    return
  fi
  if [[ ${OPT_gpu:-false} == true ]]; then
    ensure build test
    build_preset cuda
    bench/gpu.sh build/cuda --out build/cuda/gpu --only gpu,tool,hosts,conformance,sanitizer
    return
  fi
  ensure build test
  local presets options=() preset ok=true
  IFS=, read -r -a presets <<<"${OPT_preset:-dev}"
  if [[ ${OPT_all:-false} == true ]]; then presets=(dev asan-ubsan tsan); fi
  # Of several -LE ctest leaves out what matches all: beside the preset's "gpu|slow", the slow ones run.
  if [[ -n ${OPT_label:-} ]]; then options+=(-L "$OPT_label" -LE gpu); fi
  if [[ -n ${OPT_filter:-} ]]; then options+=(-R "$OPT_filter"); fi
  RESULTS=()
  for preset in "${presets[@]}"; do
    test_preset "$preset" "${options[@]}" || ok=false
  done
  if [[ $JSON == true ]]; then
    json_object ok "$ok" presets "[$(IFS=, && echo "${RESULTS[*]}")]"
  fi
  [[ $ok == true ]]
}

help coverage <<'EOF'
./dev coverage [--html] [--json]
Builds and tests the coverage preset and prints the line coverage of src/ (without src/backend/cuda)
by file. Fails below 90%. --html writes build/coverage/index.html.
EOF

cmd_coverage() {
  parse coverage "--json --html" "$@"
  no_arguments coverage
  ensure build test
  find build/coverage -name '*.gcda' -delete 2>/dev/null || true
  build_preset coverage
  run_ctest coverage >&2
  step "count covered lines"
  local options=(--root . --filter src/ --exclude src/backend/cuda/ -j "$JOBS"
    --txt build/coverage/report.txt --json-summary build/coverage/summary.json build/coverage)
  if [[ ${OPT_html:-false} == true ]]; then options+=(--html-details build/coverage/index.html); fi
  gcovr "${options[@]}"
  local percent
  percent=$(sed -nE 's/^TOTAL .* ([0-9]+)%.*/\1/p' build/coverage/report.txt)
  if [[ $JSON == true ]]; then
    cat build/coverage/summary.json
  else
    grep -vE '100%' build/coverage/report.txt
  fi
  ((percent >= 90)) || die "line coverage of src/ is $percent%, below 90%"
}
