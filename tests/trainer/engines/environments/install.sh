#!/bin/sh
# install.sh PYTHON VENV REQUIREMENTS: make the environment in which tests run an engine with other packages; 2 GB.
set -eu
"$1" -m venv "$2"
pip="$2/bin/python -m pip --disable-pip-version-check"
# First torch alone: the build that the machine's index gives is kept by what follows.
$pip install --quiet "$(grep '^torch==' "$3")"
$pip install --quiet -r "$3"
