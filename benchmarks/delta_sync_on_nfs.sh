# benchmarks/delta_sync.py in the NFS bed; figures come to $BED/out:
#
#     BED=/var/tmp/delta-sync SIZE=1500M MEM=8G LIMIT=1200 tests/beds/nfs-bed -o vers=4.2 benchmarks/delta_sync_on_nfs.sh
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
cd "$(dirname "$SCRIPT")/.."
export PYTHONPATH=$PWD:$PWD/tests
python=.venv/bin/python
[[ -x $python ]] || python=python3
modprobe -a sch_tbf
mkdir -p /dev/shm/readers
for n in $(seq 8); do
  mkdir /dev/shm/readers/$n
  nsenter --net=/run/netns/cb mount -t nfs -o vers=4.2,nosharecache 10.99.2.1:/ /dev/shm/readers/$n || exit 1
done
$python benchmarks/delta_sync.py run "$A" /dev/shm/readers $OUT/delta_sync.json --mib 32 --rounds 2 >$OUT/delta_sync.txt 2>$OUT/delta_sync.err
code=$?
umount -f /dev/shm/readers/*
exit $code
