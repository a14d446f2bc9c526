"""A mirror between directories of real NFS: one client writes the source and reads the far job, the other mirrors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.only_with(SYNCD_S3="1"),
    pytest.mark.beds,
    pytest.mark.slow,
    pytest.mark.group("mirror-nfs"),
    pytest.mark.timeout(600),
]

TESTS = Path(__file__).resolve().parents[2]
STEPS = 20
SCRIPT = f"""
export PYTHONPATH={TESTS.parent}:{TESTS} PYTHONDONTWRITEBYTECODE=1
steps={TESTS}/programs/write_steps.py
wait_for() {{ # FILE TEXT: until the file has the text, 200 s at most
  for _ in $(seq 2000); do grep -qs "$2" "$1" && return; sleep 0.1; done
  echo "waited in vain for $2 in $1"
  return 1
}}
mkdir $SRV/job $SRV/far
on_a {sys.executable} -m syncd watch $A/job >$OUT/daemon.log 2>&1 &
mirror() {{ on_b {sys.executable} -m syncd mirror $B/job $B/far "$@" >>$OUT/mirror.log 2>&1; }}
mirror &
write() {{ on_a {sys.executable} $steps $A/job $1 $2 1 --pause 0.5 >>$OUT/trainer.log 2>&1; }}
write 1 {STEPS // 2} || exit 1
wait_for $OUT/mirror.log mirror_version_published || exit 2
pkill -KILL -f 'syncd mirror'
write {STEPS // 2 + 1} {STEPS} || exit 3
wait_for $SRV/job/.syncd/version.json '"step":{STEPS}' || exit 4
mirror --once || exit 5
on_a {sys.executable} -m syncd verify $A/far {STEPS} --deep >$OUT/verify.log 2>&1 || exit 6
cd $SRV/job/global_step_{STEPS}
for file in manifest.json actor/*.safetensors; do cmp $file $SRV/far/global_step_{STEPS}/$file || exit 7; done
cmp $SRV/job/latest_state_dict_iteration.txt $SRV/far/latest_state_dict_iteration.txt || exit 8
pkill -TERM -f 'syncd watch'
wait
"""


def test_a_job_on_nfs_is_mirrored_to_nfs_through_a_kill(nfs_bed, tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(SCRIPT)
    kept = {**os.environ, "BED": str(tmp_path / "bed"), "LIMIT": "400"}
    done = subprocess.run([nfs_bed, script], env=kept, capture_output=True, text=True, check=False)
    logs = [path.read_text()[-3000:] for path in sorted((tmp_path / "bed" / "out").glob("*.log"))]
    assert done.returncode == 0, "\n".join([done.stdout[-3000:], *logs])
    assert sum(log.count("mirror_version_published") for log in logs) >= 2
