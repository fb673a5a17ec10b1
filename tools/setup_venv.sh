#!/usr/bin/env bash
# Makes a virtual environment hold this package, editable, with the extras asked for.
#
#   tools/setup_venv.sh VENV [EXTRA...]
#
# Does nothing when they are installed already and neither pyproject.toml nor the constraints have
# changed since.  An environment that no longer runs is made afresh.
#   PYTHON       interpreter to make it with (default: what tools/find_python.sh finds)
#   CONSTRAINTS  pip constraints file (default: tools/constraints.txt; empty: none)
#   UPGRADE      non-empty: bring every package to the newest version allowed
set -euo pipefail

cd "$(dirname "$0")/.."
venv=$1
shift
constraints=${CONSTRAINTS-tools/constraints.txt}

runs() {
  "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -e "$venv" ] && ! runs; then
  if [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
    echo "$venv is not a virtual environment; move it away or choose another: make VENV=... " >&2
    exit 1
  fi
  echo "$venv no longer runs or is too old: making it afresh" >&2
  rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
  python=$(tools/find_python.sh)
  echo "making $venv with $python ($("$python" -V))" >&2
  "$python" -m venv "$venv"
fi

# The path is part of the stamp: a copied tree brings an environment that points at the original.
stamp=$({ pwd; cat pyproject.toml; [ -z "$constraints" ] || cat "$constraints"; } | cksum)
missing=()
for extra in core "$@"; do
  if [ -n "${UPGRADE:-}" ] || [ "$(cat "$venv/.stamp-$extra" 2>/dev/null)" != "$stamp" ]; then
    missing+=("$extra")
  fi
done
[ ${#missing[@]} -gt 0 ] || exit 0

extras=$(IFS=,; echo "$*")
requirement=".${extras:+[$extras]}"
common=(--quiet)
[ -z "$constraints" ] || common+=(--constraint "$constraints")
pip=("$venv/bin/python" -m pip)
options=("${common[@]}" --disable-pip-version-check --no-input --no-compile)
[ -z "${UPGRADE:-}" ] || options+=(--upgrade --upgrade-strategy eager)

# uv asks for the 90 packages side by side and unpacks them in 9 s, pip one by one in 59 s. uv does not
# read pip's settings, so pip installs where they name another index, and wherever uv fails.
install_with_uv() {
  local uv=$venv/.uv/bin/uv
  ! "${pip[@]}" config list 2>/dev/null | grep -Eq '\.(index-url|no-index)=' || return 1
  [ -x "$uv" ] || "${pip[@]}" install "${options[@]}" --target "$venv/.uv" uv || return 1
  # The certificates of the system, as pip uses them. Where connections are dropped, pip may still
  # have a mirror.
  UV_SYSTEM_CERTS=1 UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-30}" timeout 300 "$uv" pip install \
    "${common[@]}" ${UPGRADE:+--upgrade} --python "$venv/bin/python" --editable "$requirement"
}

echo "installing ikbo-jax${extras:+[$extras]} into $venv (a few minutes the first time)" >&2
if ! install_with_uv </dev/null >/dev/null 2>&1 &&
  ! "${pip[@]}" install "${options[@]}" --editable "$requirement" </dev/null; then
  echo "pip could not install ikbo-jax${extras:+[$extras]}: see its message above." >&2
  echo "Without a package index, use an interpreter that has jax already: make PY=python3 ..." >&2
  exit 1
fi
# pip would compile the 9,800 modules one by one, in 23 s. Some packages bring templates that are no
# Python. Whatever is not compiled here is compiled when it is imported, which nobody does with the
# packages' own tests and Ray's reinforcement learning, a sixth of all modules.
"$venv/bin/python" -m compileall -q -j 0 -x '/(tests|rllib)/' "$venv"/lib/python*/site-packages \
  >/dev/null 2>&1 || true
for extra in core "$@"; do
  printf '%s' "$stamp" >"$venv/.stamp-$extra"
done
