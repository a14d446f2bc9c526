# benchmarks/delta_sync.py in the NFS bed; figures come to $BED/out:
#
#     BED=/var/tmp/delta-sync SIZE=4G MEM=12G LIMIT=900 tests/beds/nfs-bed -o vers=4.2 benchmarks/delta_sync_on_nfs.sh
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
measure() {
  local name=$1
  shift
  rm -rf "$A"/{copy,full,delta,auto,xor,coo}
  $python benchmarks/delta_sync.py "$A" $OUT/$name.json --mounts /dev/shm/readers "$@" >$OUT/$name.txt 2>$OUT/$name.err
}
measure delta_sync_128 --mib 128 --rounds 2 --readers 8,4,1 --rates 0.1,1
code=$?
measure delta_sync_auto --mib 128 --rounds 3 --readers 4 --rates 0.1 --ways full,auto || code=$?
measure delta_sync_256 --mib 256 --rounds 1 --readers 4,1 --rates 0.1 --ways copy,full,delta || code=$?
umount -f /dev/shm/readers/*
exit $code
