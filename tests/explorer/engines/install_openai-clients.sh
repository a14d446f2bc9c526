#!/bin/sh
# install_openai-clients.sh PYTHON VENV: make the environment in which tests run clients of OpenAI's API; 320 MB.
set -eu
here=$(dirname "$0")
"$1" -m venv "$2"
"$2/bin/python" -m pip --disable-pip-version-check install --quiet -r "$here/openai-clients.txt"
