"""Full pools at the price of one workflow: its anchors, copied.

What a correction costs depends on how many anchors there are and how long they are, not on what
they hold. So a method learns from one dense workflow, and every slot is filled with copies of that
anchor. They are real tensors of their own: their bytes are held, and no cache of the processor
serves one for all.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from kvcmas.engine.contract import Method, State


def anchors_of(method: Method) -> int:
    """Anchors of a full slot; 0 for a method that keeps none."""
    settings = method.settings()
    if "capacity" not in settings:
        return 0
    return int(settings["capacity"]) + (settings["capacity_rule"] == "authors")


def filled(state: State, method: Method) -> State:
    """An engine's state after one workflow, as it is with full pools."""
    meta, entries = copy.deepcopy(state.meta), dict(state.entries)
    _copy_anchors(meta["method"], entries, anchors_of(method))
    return State(meta, entries)


def finished(state: State, method: Method, dtype: torch.dtype) -> State:
    """The same state with GraphFlow's means of equal samples, which are that sample, finished.

    Finished means have the model's dtype.
    """
    meta, entries = copy.deepcopy(state.meta), dict(state.entries)
    for relation in meta["method"].get("relations", {}).values():
        relation["samples"] = method.settings()["n_cal"]
        name = f"m.{relation['serial']}"
        entries[name] = {
            key: t.to(dtype) if t.is_floating_point() else t for key, t in entries[name].items()
        }
    return State(meta, entries)


def _copy_anchors(
    meta: dict[str, Any], entries: dict[str, dict[str, torch.Tensor]], anchors: int
) -> None:
    for held in meta.get("slots", {}).values():
        first = held[0]
        for copied in range(1, anchors):
            parts = {}
            for name, part in first["parts"].items():
                tensors = entries[f"m.{part['entry']}"]
                entries[f"m.{meta['serial']}"] = {key: t.clone() for key, t in tensors.items()}
                parts[name] = {**part, "entry": str(meta["serial"])}
                meta["serial"] += 1
            held.append({**first, "request": f"{first['request']}-copy-{copied}", "parts": parts})
