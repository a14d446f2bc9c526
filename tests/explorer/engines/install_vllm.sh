#!/bin/sh
# install_vllm.sh PYTHON VENV: make the environment in which tests start real vLLM on the CPU; 3.4 GB.
set -eu
here=$(dirname "$0")
"$1" -m venv "$2"
pip="$2/bin/python -m pip --disable-pip-version-check"
# First torch alone: the build that the machine's index gives is kept by what follows.
$pip install --quiet "$(grep '^torch==' "$here/vllm.txt")"
$pip install --quiet -r "$here/vllm.txt"
# They come as CUDA builds and break transformers on a CPU build of torch.
$pip uninstall --quiet --yes torchvision torchaudio torchcodec
