# benchmarks/delta_sync.py in the NFS bed; figures come to $BED/out:
#
#     mkdir -p /var/tmp/delta-sync
#     for mib in 64 128 256; do PYTHONPATH=benchmarks .venv/bin/python -c "import delta, numpy
#     numpy.save('/var/tmp/delta-sync/$mib', delta.trained(1e-6, $mib << 19))"; done
#     BED=/var/tmp/delta-sync SIZE=4G MEM=14G LIMIT=1800 tests/beds/nfs-bed -o vers=4.2 benchmarks/delta_sync_on_nfs.sh
#
# The weights are made before, on the host: the bed's processor needs minutes for it.
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
measure delta_sync_codecs --weights $BED/64.npy --rounds 3 --readers 8,4,1 --rates 0.1,1
code=$?
measure delta_sync_128 --weights $BED/128.npy --rounds 3 --readers 8,4,1 --rates 0.1,1 --ways copy,full,delta || code=$?
measure delta_sync_auto --weights $BED/128.npy --rounds 3 --readers 4 --rates 0.1 --ways full,auto || code=$?
measure delta_sync_256 --weights $BED/256.npy --rounds 1 --readers 4,1 --rates 0.1 --ways copy,full,delta || code=$?
umount -f /dev/shm/readers/*
exit $code
