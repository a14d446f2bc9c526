#!/bin/sh
# install_sglang.sh PYTHON VENV: make the environment in which tests start real SGLang on the CPU.
set -eu
here=$(dirname "$0")
"$1" -m venv "$2"
pip="$2/bin/python -m pip --disable-pip-version-check"
$pip install --quiet "$(grep '^torch==' "$here/sglang.txt")"
$pip install --quiet -r "$here/sglang.txt"
$pip install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0
# What SGLang imports and a CPU has not: see the file itself.
site=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here/../../support/sglang_on_cpu.py" "$site/sglang_on_cpu.py"
echo 'import sglang_on_cpu' > "$site/sglang_on_cpu.pth"
