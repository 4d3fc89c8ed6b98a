#!/bin/sh
# Prints the first Python 3.12 or 3.13 that works here, as the path of the interpreter itself.
# A candidate is run, never trusted by its name: a version manager's shim may exist and fail, and
# a distribution's Python may lack the venv module. Every PATH entry is looked at, since a broken
# shim can hide a good interpreter behind it.
set -u

check='import ensurepip, sys, venv
if not (3, 12) <= sys.version_info[:2] <= (3, 13): sys.exit(1)
print(sys.executable)'

try() {
    found=$("$1" -c "$check" 2>/dev/null) && echo "$found" && exit 0
}

for name in python3.12 python3.13 python3 python; do
    IFS=:
    for directory in $PATH; do
        try "$directory/$name"
    done
    unset IFS
done

pyenv=${PYENV_ROOT:-${HOME-}/.pyenv}
uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME-}/.local/share}/uv/python}
for candidate in "$pyenv"/versions/3.1[23]*/bin/python "$uv"/cpython-3.1[23]*/bin/python3; do
    try "$candidate"
done

echo "No working Python 3.12 or 3.13 with its venv module: install one (apt install" \
    "python3.12-venv, pyenv install 3.12, or uv python install 3.12) and run this again." >&2
exit 1
