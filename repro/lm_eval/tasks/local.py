"""Rows and scores of the task files in this folder, from this project's own workloads.

lm-eval imports this file by its path. Where the data are is said with ``--metadata`` as ``data``
(``procedural``, ``package``, ``hub`` or a directory), else by ``REPRO_DATA``, else procedural.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import datasets

import workloads
from repro.data import PACKAGED, load_dataset
from workloads.base import Sample


def gsm8k(**metadata: Any) -> dict[str, datasets.Dataset]:
    """GSM8K, or word problems of our own."""
    return _rows("gsm8k", metadata)


def mmlu(**metadata: Any) -> dict[str, datasets.Dataset]:
    """The 153 MMLU questions of KVComm, or questions of our own."""
    return _rows("mmlu", metadata)


def humaneval(**metadata: Any) -> dict[str, datasets.Dataset]:
    """HumanEval."""
    return _rows("humaneval", metadata)


def score_gsm8k(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the answer's last number is the gold one."""
    return _score("gsm8k", doc, results)


def score_humaneval(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Pass@1: the official checks, run in the sandbox."""
    return _score("humaneval", doc, results)


def _rows(bench: str, metadata: Mapping[str, Any]) -> dict[str, datasets.Dataset]:
    otherwise = "package" if bench in PACKAGED else "procedural"
    data = metadata.get("data") or os.environ.get("REPRO_DATA") or otherwise
    samples = load_dataset(workloads.get(bench), data, split="test").samples
    rows = [
        {"id": s.id, "question": s.question, "answer": s.answer, **_texts(s.meta)} for s in samples
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def _texts(meta: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in meta.items() if isinstance(value, str)}


def _score(bench: str, doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    meta = {key: value for key, value in doc.items() if key not in ("id", "question", "answer")}
    sample = Sample(doc["id"], doc["question"], doc["answer"], meta)
    return {"acc": float(workloads.get(bench).score(sample, results[0]).correct)}
