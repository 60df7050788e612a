#!/usr/bin/env bash
# On a CUDA machine, in an environment with `pip install -e '.[vllm,dev]'`: does the plug-in equal the Transformers
# engine there, and what does one 32K cell give? Under 8 minutes. Leaves its log in gpu_serve.log
# and the records in runs/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

"$python" - <<'PY'
import torch, vllm
assert torch.cuda.is_available(), "no CUDA device"
print("vllm", vllm.__version__, "on", torch.cuda.get_device_name())
PY
{
    # Forced decoding in the tests is written for vLLM's V1 runner; the 32K cell takes the default.
    VLLM_USE_V2_MODEL_RUNNER=0 timeout 300 "$python" -m pytest -q tests/serving -m vllm
    timeout 180 repro serve --engine vllm --ctx 32k --qps 2 --profile smoke
} 2>&1 | tee gpu_serve.log
