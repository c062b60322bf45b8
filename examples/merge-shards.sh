#!/bin/bash
# After the last shard, on one machine with room for all of them: merge-shards.sh 16
# Each run comes back from its copy, finds that every prompt has its record, and starts no server; then they are merged.
set -euo pipefail
of=${1:?how many shards}
runs=()
for shard in $(seq 0 $((of - 1))); do
  tokenmill run examples/shard.toml --set "name='regen-$shard'" --set "prompts.shard='$shard/$of'"
  runs+=("/scratch/runs/regen-$shard")
done
tokenmill merge "${runs[@]}" /scratch/runs/regen
