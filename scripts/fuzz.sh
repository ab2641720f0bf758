# shellcheck shell=bash
# ./dev fuzz: the programs of tests/fuzz/, under libFuzzer. ./dev models: models/, with spin.

help fuzz <<'EOF'
./dev fuzz [TARGET..] [--minutes=N] [--json]
Builds the preset fuzz and runs each TARGET for N minutes (default 1; fractions are fine): control
(control words that peers write), exchange and rendezvous (sockets), inbox (what peers on other hosts
have stored), invitation (what one hears who joins them), parcel (where they say that rows go), safetensors (files), setup
(what peers answer while a buffer is made); all of them if none is named. Inputs that led somewhere new are kept in build/fuzz/corpus/TARGET for the next run. A target ends at its first finding; the input that
shows it is in build/fuzz/findings, and `build/fuzz/tests/fuzz/fuzz_TARGET FILE` repeats it.
EOF

FUZZERS=(control exchange inbox invitation parcel rendezvous safetensors setup)

# fuzz_target TARGET SECONDS: adds to RESULTS what came out.
fuzz_target() {
  local target=$1 seconds=$2 corpus=build/fuzz/corpus/$1 log=build/fuzz/$1.log
  local ok=true runs verdict='no finding' seed
  mkdir -p "$corpus" build/fuzz/findings
  if [[ $target != safetensors && -z $(ls -A "$corpus") ]]; then
    # Long enough to decide all that a run asks for: from nothing, libFuzzer is slow to get there.
    for seed in {1..64}; do head -c 700 /dev/urandom >"$corpus/seed$seed"; done
  fi
  step "fuzz $target"
  "build/fuzz/tests/fuzz/fuzz_$target" -max_total_time="$seconds" -max_len=700 -timeout=60 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/findings/$target-" "$corpus" \
    >"$log" 2>&1 || ok=false
  runs=$(sed -nE 's/^stat::number_of_executed_units: ([0-9]+)/\1/p' "$log")
  RESULTS+=("$(json_object target "\"$target\"" ok "$ok" runs "${runs:-0}" seconds "$seconds")")
  if [[ $ok == false ]]; then
    verdict='A FINDING'
    grep -avE '^#[0-9]+\s|NEW_FUNC|^INFO:|^stat::' "$log" >&2
  fi
  if [[ $JSON == false ]]; then echo "$target: ${runs:-0} runs, $verdict"; fi
  [[ $ok == true ]]
}

cmd_fuzz() {
  parse fuzz "--minutes= --json" "$@"
  local target seconds ok=true
  seconds=$(awk -v minutes="${OPT_minutes:-1}" 'BEGIN { printf "%d", 60 * minutes + 0.5 }')
  ((seconds > 0)) || usage_error "--minutes must be positive" fuzz
  for target in "${ARGS[@]}"; do
    [[ " ${FUZZERS[*]} " == *" $target "* ]] || usage_error "unknown target $target" fuzz
  done
  if ((${#ARGS[@]} == 0)); then ARGS=("${FUZZERS[@]}"); fi
  ensure build fuzz
  build_preset fuzz
  RESULTS=()
  for target in "${ARGS[@]}"; do
    fuzz_target "$target" "$seconds" || ok=false
  done
  if [[ $JSON == true ]]; then
    json_object ok "$ok" targets "[$(IFS=, && echo "${RESULTS[*]}")]"
  fi
  [[ $ok == true ]]
}

help models <<'EOF'
./dev models [--long] [--json]
Checks the models of the protocol with spin, a line a run: that they have no violation as they are, and
have one with any rule taken out. --long: larger runs besides, half an hour.
EOF

cmd_models() {
  parse models "--long --json" "$@"
  no_arguments models
  ensure build models
  step "spin"
  local options=() ok=true
  if [[ ${OPT_long:-false} == true ]]; then options=(--long); fi
  if [[ $JSON == false ]]; then
    models/check.sh "${options[@]}"
    return
  fi
  mkdir -p build
  models/check.sh "${options[@]}" >build/models.log || ok=false
  local lines
  mapfile -t lines <build/models.log
  json_object ok "$ok" runs "$(json_list "${lines[@]}")"
  [[ $ok == true ]]
}
