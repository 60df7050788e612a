"""Pictures of a trace: their features, one file per picture in a folder beside the trace.

A trace holds token ids. Where placeholders stand for an image or a video it names the picture by
its hash; what enters the model lies here, so that a replay needs neither the picture nor the
vision tower. A picture that several workflows look at is kept once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcmas.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from kvcmas.engine.segments import Prompt

_NAME = "features"


def features_folder(trace: Path) -> Path:
    """Where the features of ``trace`` lie; a partial trace shares it with the finished one."""
    return trace.with_suffix(".features")


def save_features(folder: Path, prompt: Prompt) -> None:
    """Keep the features of every picture of ``prompt`` that ``folder`` lacks.

    Raises:
        OSError: a file cannot be written.
    """
    from safetensors.torch import save_file

    for _, visual in prompt.visuals:
        file = _file(folder, visual.sha256)
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(".tmp")
            save_file({_NAME: visual.features.cpu().contiguous()}, temporary)
            temporary.replace(file)


def load_features(folder: Path | None, sha256: str, rows: int) -> Tensor:
    """``[rows, hidden]`` of a picture.

    Raises:
        UserError: they are not there, or are not what the trace says.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if folder is None:
        raise UserError(f"the features of picture {sha256[:12]} were not recorded with its trace")
    file = _file(folder, sha256)
    try:
        features = load_file(file)[_NAME]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"cannot read the features of picture {sha256[:12]} in {folder}; keep that folder "
            "beside its trace, or record it again"
        ) from error
    if len(features) != rows:
        raise UserError(f"{file} has {len(features)} rows where the trace says {rows}")
    return features


def _file(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256[:32]}.safetensors"
