#!/bin/sh
# setup_venv.sh STAMP CONSTRAINTS: makes or mends the virtual environment in which the stamp file
# lies, installs the requirements as the constraints file pins them and this package, then touches
# the stamp. The stamp comes last, so an interrupted installation is taken up again the next time.
set -eu
cd "$(dirname "$0")/.."
stamp=$1 constraints=$2
venv=${stamp%/*}
rm -f "$stamp"

if ! tools/find_python.sh "$venv/bin/python" >/dev/null ||
    ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    python=$(tools/find_python.sh)
    echo "Making $venv with $python"
    "$python" -m venv --clear "$venv"
fi

echo "Installing the requirements into $venv (a few minutes the first time)"
# The same pins hold for the environment that builds the package: pip up to 25.2 reads the first
# variable there, newer ones the second.
export PIP_CONSTRAINT="$constraints" PIP_BUILD_CONSTRAINT="$constraints"
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/python" -m pip install --quiet --editable ".[convert,data,demo,dev,liger,logging,vision]"
touch "$stamp"
