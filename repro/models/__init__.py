"""The models of the suite: a registry, a verified cache and a loader.

``resolve`` turns a registry name or a directory into a local Transformers directory, fetching and
converting at most once; ``load`` opens it. Nothing heavier than the standard library and Rich is
imported until a model is built or loaded.
"""

from repro.models.entries import (
    GeneratedSource,
    HubSource,
    LocalSource,
    ModelEntry,
    PackageSource,
    Source,
    WheelMember,
)
from repro.models.loading import load, load_image_processor
from repro.models.registry import DEFAULT_MODEL, get_entry, list_models
from repro.models.resolve import ResolvedModel, is_cached, resolve

__all__ = [
    "DEFAULT_MODEL",
    "GeneratedSource",
    "HubSource",
    "LocalSource",
    "ModelEntry",
    "PackageSource",
    "ResolvedModel",
    "Source",
    "WheelMember",
    "get_entry",
    "is_cached",
    "list_models",
    "load",
    "load_image_processor",
    "resolve",
]
