"""How methods are called and ordered wherever results are shown."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "nonshared": "NonShared",
        "fullshared": "FullShared",
        "droidspeak": "DroidSpeak",
        "cacheblend": "CacheBlend",
        "relaycaching": "RelayCaching",
        "epic": "EPIC",
        "graphflow": "GraphFlow",
        "kvcomm": "KVComm",
        "kvcmas": "KVCMAS",
    }
)
"""Method name to display name, in the order of the paper's tables; EPIC is not in them."""


def display_name(method: str) -> str:
    """Return the usual spelling of a method, or the name itself for a method of somebody else."""
    return METHODS.get(method, method)


def method_order(method: str) -> tuple[int, str]:
    """Sort key: the methods here in their order, then all others by name."""
    known = list(METHODS)
    return (known.index(method) if method in METHODS else len(known), method)


WITHOUT_POOL = frozenset(
    ("nonshared", "fullshared", "droidspeak", "cacheblend", "relaycaching", "epic")
)
"""Methods that learn nothing from requests: the order of requests does not matter to them."""

RANDOM_WEIGHTS = frozenset(("tiny-llama", "tiny-qwen2", "tiny-llava-onevision", "bench-llama"))
"""Models without training: what they take can be compared, what they answer means nothing."""
