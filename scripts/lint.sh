# shellcheck shell=bash
# ./dev lint, docs and format: what can be checked without building.

help lint <<'EOF'
./dev lint [--json]
Checks: clang-format-14, shellcheck, cppcheck, the layering of includes (docs/design.md), CUDA only
in the CUDA backend, file length, leftovers, and what `./dev docs` checks. Prints each finding.
EOF

FINDINGS=()
# Reads findings, one a line, under the name of a check.
report() {
  local line
  while IFS= read -r line; do
    FINDINGS+=("$1: $line")
    if [[ $JSON == false ]]; then printf '%s: %s\n' "$1" "$line"; fi
  done
}

sources() { git ls-files '*.h' '*.cc' '*.cuh' '*.cu'; }

# Scripts say so in their first line, those that are only sourced to shellcheck.
scripts() { { git grep -lE '^#(!.*\b(ba)?sh\b| shellcheck shell=)' -- ':!*.md' || true; } | sort -u; }

lint_format() {
  sources | xargs -r -P "$JOBS" -n 8 clang-format-14 --dry-run -Werror 2>&1 |
    grep -E 'error:' | sed -E 's/ error: code should.*/ not as clang-format-14 wants it (.\/dev format)/' |
    sort -t: -u -k1,1 || true
}

lint_scripts() { scripts | xargs -r shellcheck -f gcc || true; }

lint_cppcheck() {
  git ls-files 'src/*.cc' 'tools/*.cc' | xargs -r cppcheck -q -j "$JOBS" --std=c++20 --language=c++ \
    --enable=warning,performance,portability --inline-suppr --suppress=missingReturn \
    --suppress=constStatement --suppress=internalAstError --suppress=unknownMacro --template=gcc -I include -I src 2>&1 |
    grep -E ': (error|warning|performance|portability):' || true
}

# layering FOLDER ALLOWED: quoted includes in FOLDER that start with one of the project's parts must
# name one that is allowed.
layering() {
  local allowed=$2
  { git ls-files "$1/*.h" "$1/*.cc" "$1/*.cu" "$1/*.cuh" |
    xargs -r grep -HnE '^ *# *include "(tandem|layout|core|reference|runtime|backend|tests)/' || true; } |
    grep -vE "include \"($allowed)/" | sed "s,\$, (only $allowed may be included here),"
}

# The arrows of docs/design.md. registry.cc is the one place that names the backends.
lint_layering() {
  {
    layering include 'tandem'
    layering src/layout 'tandem|layout'
    layering src/core 'tandem|layout|core'
    layering src/reference 'tandem|layout|reference'
    layering src/runtime 'tandem|layout|core|runtime' | grep -v '^src/runtime/registry\.cc:'
    layering src/backend/cpu 'tandem|layout|core|runtime|backend/cpu'
    layering src/backend/cuda 'tandem|layout|core|runtime|backend/cuda'
    layering src/backend/net 'tandem|layout|core|runtime|backend/net'
    # `tandem bench` measures with the recorder, which knows graphs where there are any.
    layering tools 'tandem|reference' | grep -v '"runtime/recorder\.h"'
    layering bench 'tandem|layout|reference'
    layering examples 'tandem'
    layering python 'tandem'
    git grep -nE '^ *# *include [<"](cuda|cub/|cooperative_groups|nvrtc|thrust/)' -- \
      '*.h' '*.cc' '*.cu' '*.cuh' ':!src/backend/cuda' ':!tests/backend/cuda' |
      sed 's/$/ (CUDA only in src\/backend\/cuda)/'
    git grep -nE '^ *# *include <(uc[pst]/|netdb|netinet/|arpa/)' -- '*.h' '*.cc' ':!src/backend/net' ':!tests/backend/net' |
      sed 's/$/ (UCX and sockets of a network only in src\/backend\/net)/'
  } || true
}

# Past 500 lines a file has two ideas; tests, whose cases stand side by side, get 600.
lint_length() {
  { sources && scripts; } | xargs -r wc -l |
    awk '$2 != "total" && $1 > ($2 ~ /^tests\// ? 600 : 500) { print $2 ": " $1 " lines, split it" }'
}

# Marks of unfinished work, switched-off tests and paths of somebody's machine.
lint_leftovers() {
  git grep -nIE '\b(TODO|FIXME|XXX|HACK)\b|GTEST_SKIP|\bDISABLED_|(^|[ "=(])/(home|work|root)/' -- \
    ':!scripts/lint.sh' ':!LICENSE' || true
}

lint_docs() {
  local page link
  git ls-files '*.md' | while IFS= read -r page; do
    awk '/^```/ { code = !code } !code' "$page" | { grep -oE '\]\([^)# ]+' || true; } | sed 's/^](//' | { grep -vE '^[a-z]+:' || true; } |
      while IFS= read -r link; do
        [[ -e $(dirname "$page")/$link ]] || echo "$page: link to $link leads nowhere"
      done
  done
  { git grep -noIE 'docs/[a-z_]+\.(md|svg)' || true; } | while IFS=: read -r page line link; do
    [[ -e $link ]] || echo "$page:$line: $link does not exist"
  done
}

run_checks() {
  local check
  for check; do
    step "$check"
    report "$check" < <("lint_$check")
  done
  local ok=true
  ((${#FINDINGS[@]} == 0)) || ok=false
  if [[ $JSON == true ]]; then
    json_object ok "$ok" findings "$(json_list "${FINDINGS[@]}")"
  elif [[ $ok == false ]]; then
    echo "${#FINDINGS[@]} findings" >&2
  fi
  [[ $ok == true ]]
}

cmd_lint() {
  parse lint "--json" "$@"
  no_arguments lint
  ensure lint
  run_checks format scripts layering length leftovers docs cppcheck
}

help docs <<'EOF'
./dev docs [--json]
Checks that relative links in Markdown files lead to files, and that every page of docs/ that any
file names exists.
EOF

cmd_docs() {
  parse docs "--json" "$@"
  no_arguments docs
  run_checks docs
}

help format <<'EOF'
./dev format
Rewrites the tracked C++ and CUDA sources in place with clang-format-14.
EOF

cmd_format() {
  parse format "" "$@"
  no_arguments format
  ensure lint
  sources | xargs -r -P "$JOBS" -n 8 clang-format-14 -i
}
