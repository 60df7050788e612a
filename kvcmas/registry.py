"""Finding methods: by registered name (entry points ``kvcmas.methods``) or as ``module:Class``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from kvcmas.engine.contract import Method
from kvcmas.errors import UserError

GROUP = "kvcmas.methods"


@cache
def _registered() -> EntryPoints:
    """Looked up once: the scan reads the metadata of everything that is installed."""
    return entry_points(group=GROUP)


def method_names() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted(_registered().names))


def find_method(name: str) -> type[Method]:
    """The class behind a registered name or ``module:Class``.

    Raises:
        UserError: nothing of that name, with the nearest names; or something that is no method.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"cannot load method {name!r}: {error}") from error
    elif name in (known := _registered()).names:
        found = known[name].load()
    else:
        raise UserError(f"unknown method {name!r}{suggestion(name, method_names())}")
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"{name!r} is not a kvcmas Method")
    return found


def setting_names(method: type[Method]) -> tuple[str, ...]:
    """Settings a method takes."""
    return tuple(f.name for f in fields(method) if f.init)


def make_method(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """A method with these settings, defaults for the others.

    Raises:
        UserError: unknown method or setting (with the nearest names), or an illegal value.
    """
    method = find_method(name)
    for key in settings or {}:
        if key not in (names := setting_names(method)):
            raise UserError(f"{name} has no setting {key!r}{suggestion(key, names)}")
    return method(**(settings or {}))


def suggestion(name: str, known: tuple[str, ...]) -> str:
    """``; did you mean ...`` for the nearest known names, else the whole list."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; known: {', '.join(known)}"
