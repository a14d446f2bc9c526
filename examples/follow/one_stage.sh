#!/bin/bash
# Several engines on one host that share one stage: the first follower reads each version from the job's mount, once.
#
#   examples/follow/one_stage.sh JOB vllm=http://127.0.0.1:8000 vllm=http://127.0.0.1:8001 sglang=http://127.0.0.1:30000
#
# Starts one `syncd follow` for each engine and ends with them: when the trainer has left and all run its last version, or on
# Ctrl-C or SIGTERM, after the current load. Its exit code is that of the first follower that failed.
#
# STAGE (/dev/shm/syncd): local to this host, with space for two versions. NAME (this host's name): of the explorers.
set -u
job=$1
shift
stage=${STAGE:-/dev/shm/syncd}
name=${NAME:-$(hostname -s)}

followers=()
trap 'kill -TERM "${followers[@]}" 2>/dev/null' TERM INT
number=0
for engine in "$@"; do
  syncd follow "$job" --hook "$engine" --name "$name-$number" --stage "$stage" &
  followers+=($!)
  number=$((number + 1))
done

status=0
for follower in "${followers[@]}"; do
  wait "$follower"
  code=$?
  while kill -0 "$follower" 2>/dev/null; do # a signal has ended the wait, not the follower
    wait "$follower"
    code=$?
  done
  [[ $status -ne 0 ]] || status=$code
done
exit "$status"
