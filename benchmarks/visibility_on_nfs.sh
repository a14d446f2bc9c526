# benchmarks/visibility.py in the NFS bed: the trainer is client A, the follower client B, the daemon on either. Figures come
# to $BED/out:
#
#     BED=/var/tmp/visibility MEM=1024M SIZE=512M LIMIT=900 tests/beds/nfs-bed -o vers=4.2 benchmarks/visibility_on_nfs.sh
#
# It takes about eight minutes.
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
cd "$(dirname "$SCRIPT")/.."
export PYTHONPATH=$PWD
python=.venv/bin/python
[[ -x $python ]] || python=python3
run() { # NAME DAEMON STEPS EVERY SPREAD FILL
  local out=$OUT/$1 job=job_$1
  local -A root=([a]=$A [b]=$B)
  mkdir -p $out $SRV/$job
  $python tests/programs/observe.py $SRV/$job $out/observed.jsonl >$out/observer.log 2>&1 &
  for _ in $(seq 100); do grep -qs ready $out/observer.log && break; sleep 0.1; done
  on_$2 $python -m syncd watch ${root[$2]}/$job --keep-last 2 >$out/daemon.log 2>&1 &
  for _ in $(seq 300); do grep -qs leadership_acquired $out/daemon.log && break; sleep 0.1; done
  on_b $python benchmarks/visibility.py follow $B/$job $3 --out $out/follow.json >$out/follow.log 2>&1 &
  local follower=$!
  on_a $python benchmarks/visibility.py write $A/$job --steps $3 --every $4 --spread $5 --fill $6 --out $out/write.json
  wait $follower
  local daemon=$(pgrep -f "syncd watch.*$job" | head -1)
  cat /proc/$daemon/stat >$out/daemon.stat
  touch $out/observed.jsonl.stop
  kill -TERM $daemon
  wait
  runs="$runs $1=$out/write.json,$out/observed.jsonl,$out/follow.json"
}
runs=""
run "rhythm_a" a 60 2 0.1 0
run "rhythm_b" b 60 2 0.1 0
run "filling_b" b 40 3 0.6 0.5
$python benchmarks/visibility.py table $runs --json $OUT/visibility.json >$OUT/visibility.txt 2>&1
cat $OUT/visibility.txt
