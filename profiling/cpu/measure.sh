#!/bin/sh
# Profile SmolLM2-135M on this CPU for 100 s, serve it with the fitted model, replay a trace against
# it and record every step: what the latency model is fitted on, and what judges it.
#     sh profiling/cpu/measure.sh [FOLDER]
set -eu
out=${1:-profiling/cpu}
limits="--max-num-batched-tokens 256 --max-num-seqs 16 --kv-tokens 16384"
port=8791
mkdir -p "$out"
slosched profile --model smollm2-135m --threads 1 $limits --max-context-tokens 1024 --batches 60 \
    --time-limit 100s --overwrite -o "$out/profile.csv"
slosched fit "$out/profile.csv" -o "$out/model.json"
slosched serve --model smollm2-135m --threads 1 $limits --latency-model "$out/model.json" \
    --policy slo_aware --slo-ttft 6s --slo-tpot 400ms --port $port &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do sleep 1; done
slosched profile --record "http://127.0.0.1:$port" --time-limit 10m -o "$out/traffic.csv" --overwrite &
slosched replay --trace azure_conv -n 300 --rate 1.2 --length-scale 0.125 --seed 0 \
    --url "http://127.0.0.1:$port" -o "$out/replay"
kill -INT $server
wait
rm -r "$out/replay"
