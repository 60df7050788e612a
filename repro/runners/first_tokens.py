"""First-token distributions of NonShared, kept beside its records for comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcmas.engine.session import TurnResult
from results.records import FirstToken


class FirstTokens:
    """Log-probabilities ``[vocab]`` fp32 of every turn of a sample, one file per sample.

    Without a directory nothing is saved and nothing is found. The files may be deleted once all
    methods have run.
    """

    def __init__(self, run_directory: Path | None) -> None:
        self._directory = run_directory / "first_tokens" if run_directory else None

    def save(self, sample_id: str, results: Sequence[TurnResult]) -> None:
        """Keep the distributions of a sample's turns, with their prompts' hashes."""
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        file = self._file(self._directory, sample_id)
        temporary = file.with_suffix(".tmp")
        save_file(
            {r.node: r.first_logits.float().log_softmax(-1).cpu().clone() for r in results},
            temporary,
            metadata={r.node: r.prompt.sha256 for r in results},
        )
        temporary.replace(file)

    def load(self, sample_id: str) -> dict[str, tuple[str, Tensor]]:
        """Prompt hash and log-probabilities per node; empty where none were kept."""
        if self._directory is None:
            return {}
        file = self._file(self._directory, sample_id)
        if not file.exists():
            return {}
        with safe_open(file, framework="pt") as content:
            hashes = content.metadata()
            return {node: (hashes[node], content.get_tensor(node)) for node in content.keys()}  # noqa: SIM118

    @staticmethod
    def _file(directory: Path, sample_id: str) -> Path:
        """Named after a hash: runs in another order look samples up, and ids may hold slashes."""
        return directory / f"{hashlib.sha256(sample_id.encode()).hexdigest()[:24]}.safetensors"


def divergence(expected: Tensor, logits: Tensor) -> float:
    """KL(expected || logits) in nats; ``expected`` are log-probabilities, both ``[vocab]``."""
    actual = logits.double().log_softmax(-1).cpu()
    base = expected.double()
    return max(float((base.exp() * (base - actual)).sum()), 0.0)


def compare(result: TurnResult, expected: Mapping[str, tuple[str, Tensor]]) -> FirstToken | None:
    """Against the same node's distribution, if that turn had the very same prompt."""
    sha256, log_probabilities = expected.get(result.node, ("", torch.empty(0)))
    if sha256 != result.prompt.sha256:
        return None
    return FirstToken(
        kl=divergence(log_probabilities, result.first_logits),
        agree=bool(log_probabilities.argmax() == result.first_logits.argmax()),
    )
