# shellcheck shell=bash
# What the commands of ./dev share: talking, options, JSON.

JSON=false  # whether --json was asked for

# --- talking -------------------------------------------------------------------------------------

watched() { [[ -t 2 || -n ${CI:-} ]]; }
step() { if watched; then printf '==> %s\n' "$*" >&2; fi; }
die() {
  printf 'dev: %s\n' "$*" >&2
  exit 1
}
usage_error() { die "$1 (./dev ${2:+$2 }--help explains)"; }

# Runs a command with its output in a log file, and shows the log if the command fails. On a
# terminal the output is shown as it comes.
logged() {
  local log=$1
  shift
  mkdir -p "$(dirname "$log")"
  if [[ -t 1 && $JSON == false ]]; then
    "$@"
  elif ! "$@" >"$log" 2>&1; then
    cat "$log" >&2
    return 1
  fi
}

# What a command's --help prints, from standard input.
declare -A HELP
help() { IFS= read -r -d '' "HELP[$1]" || true; }
show_help() { printf '%s' "${HELP[$1]}"; }

# Parses the options that a command allows; the rest lands in ARGS. Usage:
#   parse COMMAND "--flag --option=" "$@"   sets OPT_flag=true or OPT_option=value.
parse() {
  local command=$1 allowed=" $2 " name value
  shift 2
  ARGS=()
  while (($#)); do
    name=${1%%=*}
    case $1 in
      --help | -h)
        show_help "$command"
        exit 0
        ;;
      --*)
        if [[ $allowed == *" $name= "* ]]; then
          if [[ $1 == *=* ]]; then
            value=${1#*=}
          else
            (($# > 1)) || usage_error "$name needs a value" "$command"
            value=$2
            shift
          fi
        elif [[ $allowed == *" $1 "* ]]; then
          value=true
        else
          usage_error "unknown option $1" "$command"
        fi
        name=${name#--}
        printf -v "OPT_${name//-/_}" %s "$value"
        ;;
      *) ARGS+=("$1") ;;
    esac
    shift
  done
  JSON=${OPT_json:-false}
}

no_arguments() { ((${#ARGS[@]} == 0)) || usage_error "unexpected argument ${ARGS[0]}" "$1"; }

# --- JSON ----------------------------------------------------------------------------------------

json_string() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  text=${text//$'\n'/\\n}
  printf '"%s"' "${text//$'\t'/\\t}"
}

# Values are JSON already.
json_object() {
  local separator='{'
  while (($#)); do
    printf '%s"%s":%s' "$separator" "$1" "$2"
    separator=,
    shift 2
  done
  printf '}\n'
}

json_list() {
  local separator='' item
  printf '['
  for item; do
    printf '%s%s' "$separator" "$(json_string "$item")"
    separator=,
  done
  printf ']'
}
