#!/usr/bin/env bash
# Everything that needs a GPU, on built programs: checks, then the benchmark. Builds nothing and
# needs no more than the programs, so that they may be carried to a machine with a GPU.
#
#   bench/gpu.sh BIN_DIR [--out DIR] [--data FILE] [--only NAME,...] [--bench-options "..."]
#
# BIN_DIR holds tandem, conformance_test, _masks_test, _recovery_test, _rejoin_test and cuda_gpu_test (or, as a build folder of the preset cuda,
# has them where CMake puts them). Groups of steps, in this order: gpu (the tests of cuda_gpu_test),
# tool (tandem test-low-latency and run-layer), hosts (over UCX: hosts that are network namespaces,
# where these can be made, and ranks that share no memory, by several transports), conformance, sanitizer (compute-sanitizer, where it
# is installed), soak (tandem soak, --soak-minutes), bench (writes DIR/h200-one-gpu.json, or as
# --json-name says). Every step has a time limit; its output goes to DIR (default: gpu-results), a
# line about it to standard output, and at the end a summary. Exit code 0 only if all went well.
#
# Ranks are spread over all GPUs that are visible. On a host with several there are two more groups,
# which run only if named: spread (all of tool, conformance and soak with a rank a GPU, as processes
# over CUDA IPC and as threads) and bench-spread (2, 4, 8 ranks, a GPU each, 1 to 4096 tokens, shares
# of the multiprocessors, and what the links allow: peer_baseline.py, which needs PyTorch; writes
# DIR/h200-Ngpu.json). Everything a first run there needs, in calls of at most ten minutes:
#
#   bench/gpu.sh BIN_DIR --only gpu,spread && bench/gpu.sh BIN_DIR --only bench-spread
set -uo pipefail

BIN=${1:?usage: gpu.sh BIN_DIR [--out DIR] [--data FILE] [--only NAME,...]}
shift
OUT=gpu-results
DATA=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../data/moe_layer.safetensors
ONLY=gpu,tool,hosts,conformance,sanitizer,bench
BENCH_OPTIONS=()
JSON_NAME=h200-one-gpu.json
SOAK_MINUTES=1
NUM_GPUS=$(nvidia-smi -L | wc -l)
while (($#)); do
  case $1 in
    --out) OUT=$2 ;;
    --data) DATA=$2 ;;
    --only) ONLY=$2 ;;
    --json-name) JSON_NAME=$2 ;;
    --soak-minutes) SOAK_MINUTES=$2 ;;
    --bench-options) read -ra BENCH_OPTIONS <<<"$2" ;;
    *) echo "gpu.sh: unknown option $1" >&2 && exit 2 ;;
  esac
  shift 2
done
mkdir -p "$OUT"

program() {
  local path
  for path in "$BIN/$1" "$BIN/tools/$1" "$BIN/tests/conformance/$1" "$BIN/tests/backend/$1"; do
    [[ -f $path && -x $path ]] && echo "$path" && return
  done
  echo "$BIN/$1" # its step will fail, and say so
}
TANDEM=$(program tandem)
export LD_LIBRARY_PATH=$BIN${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Loading and a hardware queue for each of up to 32 ranks: docs/performance.md.
export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32

PASSED=0
FAILED=()
wanted() { [[ ,$ONLY, == *,$1,* ]]; }

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 begin=$SECONDS status=0 log
  shift 2
  log=$OUT/${name//[^A-Za-z0-9_.-]/_}.log
  timeout -k 5 "$limit" "$@" >"$log" 2>&1 </dev/null || status=$?
  if ((status == 0)); then
    PASSED=$((PASSED + 1))
    printf 'ok    %4d s  %s\n' $((SECONDS - begin)) "$name"
  else
    FAILED+=("$name")
    printf 'FAIL  %4d s  %s: exit code %d\n' $((SECONDS - begin)) "$name" "$status"
    tail -n 12 "$log" | sed 's/^/      | /'
  fi
}

sanitize() {
  local tool=$1 ranks=$2 options=() ways=(--placement all --hook both)
  if [[ $tool == initcheck ]]; then
    # Of a bulk store it takes note of the first bytes only, and so calls rows unwritten that are
    # not: what the kernels themselves read is checked, where they read no rows of bulk stores.
    options=(--check-api-memory-access no)
    ways=(--placement packed --hook off)
  fi
  step "$tool-$ranks-ranks" 75 compute-sanitizer --tool "$tool" --error-exitcode 9 "${options[@]}" \
    "$TANDEM" test-low-latency --backend cuda --ranks "$ranks" --tokens 5 --hidden 264 --topk 3 \
    --experts 6 --format all --layout packed --zero-copy both "${ways[@]}" --iterations 0 \
    --timeout 60
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

if wanted gpu; then
  step gpu-tests 150 "$(program cuda_gpu_test)" --gtest_color=no
fi

if wanted tool; then
  for shape in "1 128 7168 8 64" "2 128 7168 8 64" "3 64 1000 33 50" "8 32 7168 8 288" "2 0 512 4 16"; do
    read -r ranks tokens hidden topk experts <<<"$shape"
    step "test-$ranks-ranks-$tokens-tokens-$hidden" 60 "$TANDEM" test-low-latency --backend cuda \
      --ranks "$ranks" --tokens "$tokens" --hidden "$hidden" --topk "$topk" --experts "$experts" \
      --format all --placement all --layout all --zero-copy both --hook both --iterations 5
  done
  step "test-uneven-masked" 60 "$TANDEM" test-low-latency --backend cuda --ranks 5 --uneven \
    --masked 20 --tokens 40 --hidden 2048 --experts 64 --format all --placement all --layout all \
    --zero-copy both --hook both --iterations 0
  step "test-processes" 60 "$TANDEM" test-low-latency --backend cuda --launch processes --ranks 2 \
    --tokens 16 --hidden 7168 --experts 64 --format all --placement all --zero-copy both \
    --hook both --iterations 2
  for ranks in 1 2 4 8; do
    step "run-layer-$ranks-ranks" 60 "$TANDEM" run-layer "$DATA" --backend cuda --ranks "$ranks"
  done
fi

if wanted hosts; then
  shape=(--backend cuda --tokens 16 --hidden 1000 --topk 5 --experts 14 --format all --placement all
    --layout all --zero-copy both --hook both --iterations 0)
  step "test-apart" 60 "$TANDEM" test-low-latency "${shape[@]}" --launch apart --ranks 3 --uneven
  for transports in sm,self posix,self,tcp; do
    UCX_TLS=$transports step "test-apart-$transports" 60 "$TANDEM" test-low-latency "${shape[@]}" \
      --launch apart --ranks 2
  done
  if unshare --net true 2>/dev/null; then
    step "test-hosts" 60 "$TANDEM" test-low-latency "${shape[@]}" --launch hosts --hosts 2
    step "test-hosts-that-share-memory" 90 "$TANDEM" test-low-latency "${shape[@]}" --uneven \
      --launch hosts --hosts 2 --ranks-per-host 2
    step "run-layer-hosts" 60 "$TANDEM" run-layer "$DATA" --backend cuda --launch hosts --hosts 2
  else
    echo "left out: ranks on hosts, since no network namespaces can be made here"
  fi
  TANDEM_TEST_BACKEND=cuda TANDEM_TEST_LAUNCH=apart-threads step conformance-apart-threads 300 \
    "$(program conformance_test)" --gtest_color=no
fi

if wanted conformance; then
  TANDEM_TEST_BACKEND=cuda TANDEM_TEST_LAUNCH=threads step conformance-threads 240 \
    "$(program conformance_test)" --gtest_color=no
  for launch in threads processes apart-threads; do
    for tests in masks recovery; do
      TANDEM_TEST_BACKEND=cuda TANDEM_TEST_LAUNCH=$launch step "$tests-$launch" 90 \
        "$(program conformance_${tests}_test)" --gtest_color=no
    done
  done
  TANDEM_TEST_LAUNCH=apart-threads step masks-replayed-apart-threads 60 \
    "$(program cuda_gpu_test)" --gtest_color=no --gtest_filter='CudaMasks.*:CudaLateRanks.*'
  TANDEM_TEST_BACKEND=cuda TANDEM_TEST_LAUNCH=processes step rejoin-processes 180 \
    "$(program conformance_rejoin_test)" --gtest_color=no
fi

if wanted sanitizer; then
  if command -v compute-sanitizer >/dev/null; then
    sanitize memcheck 1
    sanitize memcheck 2
    sanitize racecheck 1
    sanitize racecheck 2
    sanitize initcheck 2
    sanitize synccheck 2
    # Waits that end in a mask.
    for tool in memcheck racecheck; do
      TANDEM_TEST_PATIENCE=10 step "$tool-masks" 75 compute-sanitizer --tool "$tool" \
        --error-exitcode 9 "$(program cuda_gpu_test)" --gtest_color=no \
        --gtest_filter='CudaLateRanks.OneOfTwoIsMasked'
    done
  else
    FAILED+=("compute-sanitizer is not installed")
  fi
fi

# soak LAUNCH RANKS MINUTES: every row is checked; then ranks are killed and stopped.
soak() {
  step "soak-$1" $(($3 * 60 + 60)) "$TANDEM" soak --backend cuda --launch "$1" --ranks "$2" \
    --minutes "$3"
}

if wanted soak; then
  soak threads 4 "$SOAK_MINUTES"
fi

if wanted spread; then
  for launch in threads processes; do
    step "spread-test-$launch" 90 "$TANDEM" test-low-latency --backend cuda --launch "$launch" \
      --ranks "$NUM_GPUS" --tokens 128 --hidden 7168 --experts 256 --format all --placement all \
      --layout all --zero-copy both --hook both --iterations 20
    TANDEM_TEST_BACKEND=cuda TANDEM_TEST_LAUNCH=$launch step "spread-conformance-$launch" 150 \
      "$(program conformance_test)" --gtest_color=no
  done
  soak processes "$NUM_GPUS" 3
fi

if wanted bench-spread; then
  options=(--backend cuda --data "$DATA" --experts 256 --placement "packed,slotted" --routing uniform)
  parts=()
  bench_part() { # NAME OPTIONS...
    local name=$1
    shift
    step "bench-$name" 150 "$TANDEM" bench "${options[@]}" "$@" --json "$OUT/bench-$name.json"
    cat "$OUT/bench-$name.log"
    parts+=("$OUT/bench-$name.json")
  }
  for ranks in 2 4 8; do
    ((ranks <= NUM_GPUS)) || continue
    bench_part "$ranks-gpus" --ranks "$ranks" --tokens 1,8,32,128,512,4096 --format bf16,fp8 \
      --staging zero-copy,staged
  done
  for sms in 8 16 24 32; do
    bench_part "$sms-sms" --ranks "$NUM_GPUS" --tokens 8,128 --format bf16,fp8 --sms "$sms" \
      --staging zero-copy
  done
  bench_part processes --launch processes --ranks "$NUM_GPUS" --tokens 8,128 --format bf16,fp8 \
    --staging zero-copy
  step peers 150 "$(dirname "${BASH_SOURCE[0]}")/peer_baseline.py" --json "$OUT/peers.json" \
    --gpus "$(seq -s, 2 2 "$NUM_GPUS" | grep . || echo 1)"
  cat "$OUT/peers.log"
  # One file, with the fields of h200-one-gpu.json: the rows of all parts, and the links'.
  step merge 10 python3 -c '
import json
import sys

target, peers, *parts = sys.argv[1:]
read = [json.load(open(part)) for part in parts]
merged = {**read[0], "command": [part["command"] for part in read],
          "rows": [row for part in read for row in part["rows"]],
          "peers": json.load(open(peers))["rows"]}
with open(target, "w", encoding="utf-8") as file:
    json.dump(merged, file, indent=1)
' "$OUT/h200-${NUM_GPUS}gpu.json" "$OUT/peers.json" "${parts[@]}"
fi

if wanted bench; then
  step bench 330 "$TANDEM" bench --backend cuda --data "$DATA" --json "$OUT/$JSON_NAME" \
    "${BENCH_OPTIONS[@]}"
  cat "$OUT/bench.log"
fi

printf '\n%d steps passed, %d failed\n' "$PASSED" "${#FAILED[@]}"
if ((${#FAILED[@]} > 0)); then
  printf '  %s\n' "${FAILED[@]}"
  exit 1
fi
