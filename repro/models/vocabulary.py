"""What a model's token ids allow, from its configuration and tokenizer alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcmas.errors import UserError
from repro.models.loading import load_tokenizer, quiet_transformers


@dataclass(frozen=True)
class Vocabulary:
    """Ids that model and tokenizer both know.

    Attributes:
        size: ids are ``range(size)``.
        special: those that mean something to the model and stand for no text.
        start: the id that opens a text, else one that ends it: an attention sink for segments that
            are prefilled by themselves. None if there is neither.
        positions: longest context, None where the model does not say.
    """

    size: int
    special: frozenset[int]
    start: int | None
    positions: int | None


def read_vocabulary(directory: Path) -> Vocabulary:
    """Read a Transformers directory.

    Raises:
        UserError: it cannot be opened.
    """
    from transformers import AutoConfig

    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(directory).get_text_config()
            tokenizer = load_tokenizer(directory)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read vocabulary of {directory}: {error}") from error
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    ends = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if isinstance(i, int)]
    return Vocabulary(
        size=min(config.vocab_size, len(tokenizer)),
        special=frozenset(special),
        start=ends[0] if ends else None,
        positions=getattr(config, "max_position_embeddings", None),
    )
