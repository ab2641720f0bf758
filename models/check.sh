#!/usr/bin/env bash
# Checks models/protocol.pml with spin (Debian: spin, and a C compiler): the protocol as it is, for every
# interleaving of RANKS ranks (default 2) over OPERATIONS operations (default 3); then, over one operation
# more, that taking out any one rule is found. Exit code 0 only if the first finds nothing and each of the
# others does. spin's own exit code says nothing about violations: its line 'errors:' is read.
set -euo pipefail

RANKS=${1:-2}
OPERATIONS=${2:-3}
model=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/protocol.pml
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

# verify OPERATIONS [-DNO_...]: prints errors, states.
verify() {
  spin -a "-DR=$RANKS" "-DOPS=$1" ${2:+"$2"} "$model"
  cc -O2 -DSAFETY -DCOLLAPSE -DMEMLIM=8000 -o pan pan.c
  ./pan -m1000000 >report
  sed -nE 's/.*errors: ([0-9]+).*/\1/p; s/^ *([0-9.e+]+) states, stored.*/\1/p' report | tr '\n' ' '
}

status=0
read -r errors states <<<"$(verify "$OPERATIONS")"
echo "as it is: $errors errors, $states states, $RANKS ranks, $OPERATIONS operations"
[[ $errors == 0 ]] || status=1
for rule in NO_RULE1 NO_RULE2 NO_RULE3 NO_REFUSALS NO_EPOCHS; do
  read -r errors states <<<"$(verify $((OPERATIONS + 1)) "-D$rule")"
  echo "$rule: $errors errors, $states states until the first"
  [[ $errors != 0 ]] || status=1
done
exit $status
