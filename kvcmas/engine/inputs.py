"""What enters layer 0: token embeddings, and features where an image or a video stands."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcmas.engine.adapter import ModelAdapter
from kvcmas.engine.segments import Prompt


class InputRows:
    """Hidden states at layer 0 of a prompt's rows, made for the rows that are asked for."""

    def __init__(self, model: ModelAdapter, prompt: Prompt) -> None:
        self._model = model
        self._ids = torch.tensor(prompt.ids, device=model.spec.device)
        self._visuals = prompt.visuals

    def __call__(self, rows: Tensor) -> Tensor:
        """``[rows, hidden]`` of sorted or unsorted host ``rows``."""
        spec = self._model.spec
        hidden = self._model.embed(self._ids[rows.to(spec.device)])
        for taken, visual in self._visuals:
            at = ((rows >= taken.start) & (rows < taken.stop)).nonzero().squeeze(1)
            if len(at):
                features = visual.features[(rows[at] - taken.start).to(visual.features.device)]
                # A copy: an adapter may hand out rows that it keeps.
                hidden = hidden.index_copy(0, at.to(spec.device), features.to(hidden))
        return hidden
