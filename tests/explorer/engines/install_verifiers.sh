#!/bin/sh
# install_verifiers.sh PYTHON VENV: make the environment in which tests play environments of verifiers; 570 MB.
set -eu
here=$(dirname "$0")
"$1" -m venv "$2"
"$2/bin/python" -m pip --disable-pip-version-check install --quiet -r "$here/verifiers.txt"
