#!/bin/sh
# Make a virtual environment with the pinned dependencies: scripts/setup.sh VENV LOCK [pip arguments for this project]
# Set PYTHON to choose the interpreter; otherwise the first that works is taken.
set -eu
venv=$1 lock=$2
shift 2

works() {
    "$1" -c 'import sys, ensurepip, ssl, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# The lock is resolved for 3.12, so that comes first. A name on PATH may be a stub that fails, hence the trial run.
candidates() {
    [ -z "${PYTHON:-}" ] || echo "$PYTHON"
    echo python3.12
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python /opt/*/bin/python3.12 /usr/local/bin/python3.12 2>/dev/null || true
    uv python find --no-python-downloads 3.12 2>/dev/null || true
    echo python3.13
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python 2>/dev/null || true
    echo python3
}

python=
for candidate in $(candidates); do
    if works "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ] && command -v uv >/dev/null 2>&1; then
    uv python install 3.12 && python=$(uv python find 3.12) || true
fi
if [ -z "$python" ]; then
    echo "setup: no working Python 3.12 or 3.13 with venv and ssl found; install one (e.g. apt install python3.12-venv) or set PYTHON=/path/to/python" >&2
    exit 1
fi
echo "setup: $("$python" --version) at $(command -v "$python"); installing into $venv (several minutes the first time)"
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$lock" ||
    { echo "setup: installing from $lock failed; the lines above say which package" >&2; exit 1; }
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
touch "$venv/.ready"
