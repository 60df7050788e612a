"""`repro serve --mode emulate`: what differs from serving the methods themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvcmas.errors import UserError
from repro.models import ResolvedModel
from repro.profiles.serve import ServeProfile
from repro.runners.emulation.cells import emulation_name
from repro.runners.emulation.engine import EmulatedBackend, HFPrefiller
from repro.runners.serving.backend import Sketch

NOTE: Final = (
    "emulated: the public harness's cost model, constants in repro/emulation.yaml; no method runs,"
    " requests are served one at a time"
)


def emulation_changes(values: dict[str, Any]) -> dict[str, Any]:
    """Take ``emulation.key=value`` out of the settings of a command line."""
    keys = [key for key in values if key.startswith("emulation.")]
    return {key.removeprefix("emulation."): values.pop(key) for key in keys}


def emulated_profile(profile: ServeProfile, laws: str | None) -> ServeProfile:
    """The profile as the harness would have it: even arrivals, and methods that it has a cost for.

    Args:
        laws: what the command line asks for.

    Raises:
        UserError: something that the harness does not do.
    """
    refused: Mapping[str, bool] = {
        "--gate live": profile.gate == "live",
        "--decode": profile.decode,
        f"--arrival {laws}": laws not in (None, "even"),
    }
    if asked := [option for option, given in refused.items() if given]:
        raise UserError(f"emulation sends evenly and to the first token: no {asked[0]}")
    methods = tuple(spec for spec in profile.methods if emulation_name(spec) is not None)
    if not methods:
        raise UserError("none of these variants has an emulation, see repro/emulation.yaml")
    rates = profile.arrival.get("even", next(iter(profile.arrival.values())))
    own = {"arrival": None, "pool": None}
    contexts = {ctx: one.model_copy(update=own) for ctx, one in profile.contexts.items()}
    changes = {"methods": methods, "arrival": {"even": rates}, "pool": 0, "contexts": contexts}
    return profile.model_copy(update=changes)


def emulated_backend(
    engine: str,
    model: ResolvedModel,
    sketch: Sketch,
    profile: ServeProfile,
    device: str,
    positions: int,
) -> EmulatedBackend:
    """The engine with the model in it, plain vLLM or Transformers."""
    if engine == "hf":
        prefiller = HFPrefiller(model, profile.dtype, device)
        return EmulatedBackend(prefiller, sketch, device, positions)
    from repro.runners.emulation.vllm import VLLMPrefiller

    return EmulatedBackend(VLLMPrefiller(model, sketch, positions), sketch, device, positions)
