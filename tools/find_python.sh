#!/bin/sh
# Prints the first Python that works here and that pyproject.toml allows, as the path of the
# interpreter itself. With an argument only that interpreter is tried, in silence.
# A candidate is run, never trusted by its name: a version manager's shim may exist and fail, and
# a distribution's Python may lack the venv module. Every PATH entry is looked at, since a broken
# shim can hide a good interpreter behind it.
set -u

# requires-python = ">=3.oldest,<3.beyond", read without a tool that PATH might lack.
while read -r line; do
    case $line in requires-python*) requires=$line ;; esac
done <"${0%/*}/../pyproject.toml"
oldest=${requires#*>=3.} beyond=${requires#*<3.}
oldest=${oldest%%,*} beyond=${beyond%%\"*}

check="import ensurepip, sys, venv
if not (3, $oldest) <= sys.version_info[:2] < (3, $beyond): sys.exit(1)
print(sys.executable)"

try() {
    found=$("$1" -c "$check" 2>/dev/null) && echo "$found" && exit 0
}

if [ $# -gt 0 ]; then
    try "$1"
    exit 1
fi

minor=$oldest versions='' names=''
while [ "$minor" -lt "$beyond" ]; do
    versions="$versions 3.$minor" names="$names python3.$minor"
    minor=$((minor + 1))
done

for name in $names python3 python; do
    IFS=:
    for directory in $PATH; do
        try "$directory/$name"
    done
    unset IFS
done

pyenv=${PYENV_ROOT:-${HOME-}/.pyenv}
uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME-}/.local/share}/uv/python}
for version in $versions; do
    for candidate in "$pyenv/versions/$version".*/bin/python \
        "$uv/cpython-$version".*/bin/python3; do
        try "$candidate"
    done
done

echo "No working Python of$versions with its venv module: install one (apt install" \
    "python3.$oldest-venv, pyenv install 3.$oldest, or uv python install 3.$oldest) and run" \
    "this again." >&2
exit 1
