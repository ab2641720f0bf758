#!/usr/bin/env bash
# Checks the models with spin (Debian: spin, and a C compiler).
#   models/check.sh           what CI runs: five minutes of a processor, 2 GB each
#   models/check.sh --long    larger runs besides: half an hour, 12 GB each
# JOBS=N: so many at a time (default: the number of cores).
# Each run visits every state that the model has with its parameters (no hashing that forgets, no bound
# on depth), or fails. Prints one line a run. Exit code 0 only if the models as they are have no
# violation, and have one with any rule taken out. spin's own exit code says nothing about violations:
# its line 'errors:' is read.
set -euo pipefail

models=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
case ${1:-} in
  '') long=false ;;
  --long) long=true ;;
  *) sed -n '2,9s/^# \?//p' "$0" && exit 2 ;;
esac
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
JOBS=${JOBS:-$(nproc)}
num_runs=0

# verify MODEL RANKS OPERATIONS [-DOPTION..]: sets errors, states, seconds. In membership.pml,
# recovery.pml and arrival.pml ranks end where they die; they assert themselves that nobody waits for
# ever, where protocol.pml has invalid end states. level: of optimisation; a first violation is
# mostly found before a compiler that tries harder has ended.
level=-O2
verify() {
  local model=$1 begin=$SECONDS options=(-m10000000)
  [[ $model == protocol ]] || options+=(-E)
  spin -a "-DR=$2" "-DOPS=$3" "${@:4}" "$models/$model.pml" >spin.log
  cc -w "$level" -DSAFETY -DCOLLAPSE -DMEMLIM=12000 -o pan pan.c
  ./pan "${options[@]}" >report 2>&1
  errors=$(sed -nE 's/.*errors: ([0-9]+).*/\1/p' report)
  states=$(sed -nE 's/^ *([0-9.e+]+) states, stored.*/\1/p' report)
  seconds=$((SECONDS - begin))
  # An interrupted search has no verdict.
  if [[ $errors == 0 ]] && grep -qE 'Search not completed|max search depth|out of memory' report; then
    errors=unknown
  fi
}

check_holds() {
  verify "$@"
  echo "$1, $2 ranks, $3 operations${4:+, ${*:4}}: errors: $errors, $states states, $seconds s"
  [[ $errors == 0 ]]
}

check_fails() {
  verify "$@"
  echo "$1, $2 ranks, $3 operations, ${*:4}: errors: $errors, $states states until the first"
  [[ $errors == [1-9]* ]]
}

# start CHECK ARGUMENTS..: in a folder of its own, once another run leaves room; `right` says that the
# model is as it must be.
start() {
  while (($(jobs -rp | wc -l) >= JOBS)); do wait -n || true; done
  local run=run$((num_runs++))
  mkdir "$run"
  (cd "$run" && "$@" && touch right && rm -f pan pan.* report) &
}

holds() { start check_holds "$@"; }
# The rule is the last argument.
fails() { start check_fails "$@"; }

holds protocol 2 6
holds protocol 2 6 -DFINE
holds protocol 3 6
for rule in NO_RULE1 NO_RULE2 NO_RULE3 NO_REFUSALS NO_EPOCHS; do
  fails protocol 2 4 "-D$rule"
  fails protocol 3 4 "-D$rule"
done

crash=(-DCRASHES=1 -DHASTE=0)
haste=(-DCRASHES=0 -DHASTE=1)
both=(-DCRASHES=1 -DHASTE=1)
holds membership 2 6 "${both[@]}"
holds membership 3 1 "${both[@]}"
holds membership 3 3 "${crash[@]}"
holds membership 3 2 "${haste[@]}"
for rule in NO_ACK NO_FINISHED NO_SILENCE NO_BRACKET; do
  fails membership 3 1 "${both[@]}" "-D$rule"
done
fails membership 3 2 "${haste[@]}" -DNO_LAST_LOOK

# Slotted dispatches, with hooks that are held back.
slotted=-DKINDS=SLOTTED
holds membership 2 4 "${both[@]}" -DKINDS=COMBINE+SLOTTED
holds membership 3 1 "${both[@]}" "$slotted"
holds membership 3 2 "${crash[@]}" "$slotted"
for rule in NO_ACK NO_FINISHED; do
  fails membership 3 1 "${both[@]}" "$slotted" "-D$rule"
done

# Ranks that are let in: again, or for the first time.
again=("${haste[@]}" -DUNMASKS=1 -DKINDS=PACKED+SLOTTED)
holds membership 2 4 "${again[@]}"
for rule in NO_KNOCK NO_TOLD; do
  fails membership 2 4 "${again[@]}" "-D$rule"
done
join=(-DHASTE=0 -DUNMASKS=1 -DJOIN)
holds membership 2 4 -DCRASHES=1 "${join[@]}" -DKINDS=PACKED+COMBINE+SLOTTED
holds membership 3 3 -DCRASHES=0 "${join[@]}" "$slotted" -DCOARSE
for rule in NO_MARGIN NO_ENTRY_LOOK NO_HOOK_LOOK NO_TOLD; do
  fails membership 3 3 -DCRASHES=0 "${join[@]}" "$slotted" -DCOARSE "-D$rule"
done

holds recovery 2 2 "${crash[@]}" -DFAILURES=2
holds recovery 3 1 "${crash[@]}"
holds recovery 3 1 "${haste[@]}"
holds recovery 3 2 -DCRASHES=0 -DHASTE=0
for rule in NO_MAXIMUM NO_ROUND NO_TOLD; do
  fails recovery 2 2 -DCRASHES=0 -DHASTE=0 -DFAILURES=2 "-D$rule"
done
fails recovery 2 2 "${crash[@]}" -DNO_LEAVING

# Of ranks of several hosts; the operations are ballots.
holds council 2 4
holds council 3 3
holds council 4 2
for rule in NO_KEEP NO_PROMISE; do
  fails council 3 2 "-D$rule"
done
fails council 2 2 -DNO_LOWEST
fails council 4 2 -DNO_LOWEST

# A process that comes to ranks of several hosts: one; two at once; one in place of another; two that
# want one place, and begin no operation.
one=(-DNEW=1 -DHOOKS=2)
two=(-DNEW=2)
successor=(-DNEW=2 -DSUCCESSOR -DVICTIMS=2 -DROWS)
rivals=(-DNEW=2 -DSUCCESSOR -DVICTIMS=4)
holds arrival 3 4 "${one[@]}"
holds arrival 3 3 "${two[@]}"
holds arrival 2 7 "${successor[@]}"
holds arrival 3 0 "${rivals[@]}" -DHASTE=1
holds arrival 3 3 "${rivals[@]}" -DSTILL=1 -DLETS=1
level=-O0
fails arrival 3 4 "${one[@]}" -DNO_MARGIN
for rule in NO_MET NO_BOOK NO_TURN NO_ACK NO_LAST_LOOK NO_REPEAT NO_NEWS; do
  fails arrival 3 3 "${two[@]}" "-D$rule"
done
for rule in NO_TOKENS NO_MASK NO_ORDER NO_LIFE NO_SILENCE NO_CLOSE; do
  fails arrival 2 7 "${successor[@]}" "-D$rule"
done
fails arrival 3 0 "${rivals[@]}" -DHASTE=1 -DNO_LOWEST
fails arrival 3 3 "${rivals[@]}" -DSTILL=1 -DLETS=1 -DNO_NEWEST
level=-O2

if [[ $long == true ]]; then
  holds council 4 3
  holds protocol 2 40
  holds protocol 3 12
  holds membership 3 5 "${crash[@]}"
  holds membership 3 3 "${haste[@]}"
  holds membership 3 2 "${both[@]}"
  holds membership 2 4 -DCRASHES=1 -DHASTE=1 -DUNMASKS=1 -DKINDS=PACKED+SLOTTED
  holds membership 3 3 -DCRASHES=0 "${join[@]}" "$slotted"
  holds recovery 2 2 -DCRASHES=1 -DHASTE=1 -DFAILURES=2
fi
wait
num_right=$(find . -name right | wc -l)
((num_right == num_runs)) || { echo "$((num_runs - num_right)) of $num_runs runs are not as they must be" && exit 1; }
