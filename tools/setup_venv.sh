#!/bin/sh
# Makes or mends .venv, installs the pinned requirements and this package, then touches the stamp
# file $1. The stamp comes last, so an interrupted installation is taken up again the next time.
set -eu
cd "$(dirname "$0")/.."
stamp=$1
rm -f "$stamp"

usable='import pip, sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))'
if ! .venv/bin/python -c "$usable" 2>/dev/null; then
    python=$(tools/find_python.sh)
    echo "Making .venv with $python"
    "$python" -m venv --clear .venv
fi

echo "Installing the requirements into .venv (a few minutes the first time)"
# The same pins hold for the environment that builds the package: pip up to 25.2 reads the first
# variable there, newer ones the second.
export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1
.venv/bin/python -m pip install --quiet --editable ".[demo,dev]"
touch "$stamp"
