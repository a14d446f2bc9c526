#!/usr/bin/env bash
# Installs syncd[trainer] from its wheel with the newest releases that the package index has, without constraints.txt, and
# trains two steps with it: `tests/programs/try_install.sh PYTHON DIR`. Ends with the versions, which docs/tested.md names.
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
python=$1
rm -rf "$2"
"$python" -m venv "$2"
cd "$2"
bin=$PWD/bin
"$bin/python" -m pip install --quiet --disable-pip-version-check build
"$bin/python" -m build --outdir dist "$source" > build.log
"$bin/python" -m pip install --quiet --disable-pip-version-check "$(echo dist/*.whl)[trainer]"

"$bin/python" "$source/examples/arithmetic/make.py" try --examples 200
"$bin/syncd" init try/sft --model try/model --recipe sft
"$bin/trainer" train try/sft/job.toml --nproc 1 --data.groups 1 --data.max_length 64 --sync.interval 1 --trainer.total_steps 2 --algorithm.optimizer.warmup_steps 0
"$bin/syncd" watch try/sft/job --once
"$bin/syncd" verify try/sft/job 2 --deep
"$bin/python" -V
"$bin/python" -m pip freeze --disable-pip-version-check | grep -Ei '^(accelerate|numpy|peft|pyarrow|pydantic|ray|safetensors|tensordict|torch|transformers|verl)=='
