#!/bin/sh
# install_tinker.sh PYTHON VENV: make the environment in which tests start a real tinker server on the CPU; 2.2 GB.
set -eu
here=$(dirname "$0")
"$1" -m venv "$2"
pip="$2/bin/python -m pip --disable-pip-version-check"
# First torch alone: the build that the machine's index gives is kept by what follows.
$pip install --quiet "$(grep '^torch==' "$here/tinker.txt")"
$pip install --quiet -r "$here/tinker.txt"
