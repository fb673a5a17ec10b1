#!/usr/bin/env bash
# Prints the path of a Python that can make a virtual environment and is new enough.
#
#   tools/find_python.sh [--min X.Y] [--series X.Y] [--no-download]
#
# Order: $PYTHON alone if it is set; else python3.13, python3.12, python3; then pyenv's installed
# versions, newest first; then uv.  Every candidate is executed, because a name on PATH proves
# nothing: pyenv's shims exist for versions that are not selected and fail when they are run, and
# Debian ships a python3 without ensurepip.
set -euo pipefail

min=3.12
series=""
download=yes
while [ $# -gt 0 ]; do
  case "$1" in
    --min) min=$2; shift 2 ;;
    --series) series=$2; shift 2 ;;
    --no-download) download=no; shift ;;
    *) echo "usage: $0 [--min X.Y] [--series X.Y] [--no-download]" >&2; exit 64 ;;
  esac
done

wanted="Python >= $min"
[ -n "$series" ] && wanted="Python $series"
tried=""

probe='
import sys
low, series = sys.argv[1], sys.argv[2]
here = sys.version_info[:2]
name = "%d.%d" % here
if series and name != series:
    sys.exit("is Python %s" % name)
if here < tuple(int(p) for p in low.split(".")):
    sys.exit("is Python %s, too old" % name)
for module in ("venv", "ensurepip", "ssl"):
    try:
        __import__(module)
    except ImportError:
        hint = " (Debian and Ubuntu: apt install python%s-venv)" % name if module != "ssl" else ""
        sys.exit("is Python %s without the module %s%s" % (name, module, hint))
print(sys.executable)
'

# Prints the real path and ends the script if the candidate will do, else notes why not.
try() {
  local path found
  if ! path=$(command -v "$1" 2>/dev/null); then
    tried+="  $1: not found"$'\n'
    return 0
  fi
  if found=$("$path" -c "$probe" "$min" "$series" 2>&1 </dev/null); then
    printf '%s\n' "$found"
    exit 0
  fi
  # The last line of an interpreter's complaint is its reason; a shim's is a hint, so take the first.
  case "$found" in
    Traceback*) found=${found##*$'\n'} ;;
    *) found=${found%%$'\n'*} ;;
  esac
  tried+="  $1 ($path): ${found:-does not run}"$'\n'
}

if [ -n "${PYTHON:-}" ]; then
  try "$PYTHON"
  printf 'PYTHON=%s will not do; %s is needed:\n%s' "$PYTHON" "$wanted" "$tried" >&2
  exit 1
fi

[ -n "$series" ] && try "python$series"
for name in python3.13 python3.12 python3; do
  try "$name"
done

pyenv_root=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}
if [ -d "$pyenv_root/versions" ]; then
  while IFS= read -r version; do
    try "$pyenv_root/versions/$version/bin/python3"
  done < <(ls -1 "$pyenv_root/versions" | grep -E '^3\.[0-9]+\.[0-9]+$' | sort -rV)
else
  tried+="  pyenv: no versions under $pyenv_root"$'\n'
fi

if command -v uv >/dev/null 2>&1; then
  request=">=$min"
  [ -n "$series" ] && request=$series
  if ! found=$(uv python find --no-project "$request" 2>/dev/null) && [ "$download" = yes ]; then
    install=$min
    [ -n "$series" ] && install=$series
    echo "no $wanted here; asking uv for Python $install" >&2
    uv python install "$install" >&2 || true
    found=$(uv python find --no-project "$request" 2>/dev/null) || found=""
  fi
  if [ -n "${found:-}" ]; then try "$found"; else tried+="  uv: has none"$'\n'; fi
else
  tried+="  uv: not found"$'\n'
fi

{
  echo "no usable $wanted on this machine. Tried:"
  printf '%s' "$tried"
  echo "Install one (https://www.python.org, your package manager, or"
  echo "\`pyenv install $min\`, or uv: https://docs.astral.sh/uv), or name one: make PYTHON=/path/to/python3 ..."
} >&2
exit 1
