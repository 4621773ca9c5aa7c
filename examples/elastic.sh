#!/bin/sh
# A store in a process of its own, and one torchrun for each rank: it starts its rank again if that dies.
# sh examples/elastic.sh [RANKS]        FJOIN_STORE=host:port, by default a free port of this host
set -u
export RANKS="${1:-3}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python="${PYTHON:-python}"
free='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
export FJOIN_STORE="${FJOIN_STORE:-127.0.0.1:$($python -c "$free")}"

$python -c "
import sys, time, torch.distributed as dist
store = dist.TCPStore('0.0.0.0', int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(1e9)" "${FJOIN_STORE##*:}" &
store=$!
trap 'kill $store' EXIT

ranks=""
for number in $(seq "$RANKS"); do
    # On GPUs: CUDA_VISIBLE_DEVICES=$((number - 1)) in front of the next line.
    $python -m torch.distributed.run --standalone --nproc-per-node 1 --max-restarts 10 "$(dirname "$0")/elastic.py" &
    ranks="$ranks $!"
done
failed=0
for rank in $ranks; do
    wait "$rank" || failed=1
done
exit $failed
