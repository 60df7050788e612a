#!/usr/bin/env bash
# On a CUDA machine, in an environment with `pip install -e .`: what one request stream costs on random weights of
# Llama-3.1-8B in bf16, at 2K, 8K and 32K shared tokens. Nothing is downloaded. Under 10 minutes: the methods of the
# headline first, the others in the time that is left; what was finished is kept, and the same command goes on. Records
# and tables are in runs/ and the log in gpu_stream.log, where the script is called.
#
# Arguments are passed to repro, for instance on a CPU:
#   scripts/gpu_stream.sh --model bench-llama --scale 64 --set device=cpu --set dtype=auto --out runs
set -euo pipefail
limit=570 # seconds

# Half the workflows of the profile and a quarter of its outputs: TTFT and memory are what matters here.
stream() {
    local left=$((limit - SECONDS))
    if ((left < 20)); then
        echo "no time left for: $*"
        return
    fi
    # 124 is timeout's, 130 that of an interrupted run: both leave finished workflows behind.
    timeout --signal=INT "$left" repro stream --profile paper --part context --load dummy \
        --workflows 2 --outputs 32 "$@" || [[ $? == 124 || $? == 130 ]]
}
{
    stream --methods nonshared,fullshared,kvcmas --rho 0.8 "$@"
    stream --methods droidspeak,cacheblend,relaycaching --rho 0.9 "$@"
    stream --methods kvcomm --rho 0.8 "$@"
    # GraphFlow keeps one mean per relation in fp32 while it learns: tens of GB at 32K.
    stream --methods graphflow --rho 0.8 --ctx 2k,8k "$@"
} 2>&1 | tee gpu_stream.log
