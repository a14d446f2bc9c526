# benchmarks/sync.py on NFS: the trainer is one client, the readers are another, the server's disk is memory. A script for
# the bed; figures come to $BED/out:
#
#     BED=/var/tmp/sync-nfs SIZE=2G MEM=8G LIMIT=900 tests/beds/nfs-bed -o vers=4.2 benchmarks/sync_on_nfs.sh
#
# It takes about six minutes. What is measured stands here: nothing can be handed into the machine.
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
cd "$(dirname "$SCRIPT")/.."
python=.venv/bin/python
[[ -x $python ]] || python=python3
mkdir -p /dev/shm/stage
$python benchmarks/sync.py --gib 0.0625 --rounds 2 --readers 1,4,8 --dir "$A" --reader-dir "$B" --stage /dev/shm/stage \
  --json "$OUT/sync.json" >"$OUT/sync.txt" 2>&1
$python benchmarks/sync_bound.py --gib 0.0625 --rounds 3 --dir "$A" --reader-dir "$B" --stage /dev/shm/stage \
  --json "$OUT/bound.json" >"$OUT/bound.txt" 2>&1
