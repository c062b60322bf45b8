#!/bin/bash
# After the last shard, on one machine with room for all of them:   examples/merge-shards.sh 16
# Change: the environment; `runs`, the output.dir of examples/shard.toml.
# Each run comes back from its copy and finds that every prompt has its record: it looks for no GPU and starts no server.
# doctor looks at this machine all the same, so engine.python of shard.toml must be here, too. Call it from the repository's root.
# A shard that is not at its end stops this: queue it once more. Started again, it goes on where it was.
set -euo pipefail
of=${1:?how many shards}
environment=/opt/tokenmill
runs=/scratch/runs

source "$environment/bin/activate"
shards=()
for ((shard = 0; shard < of; shard++)); do
  tokenmill run examples/shard.toml --set "name='regen-$shard'" --set "prompts.shard='$shard/$of'" \
    --set fleet.gpus=none
  shards+=("$runs/regen-$shard")
done
tokenmill merge "${shards[@]}" "$runs/regen"
