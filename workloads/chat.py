"""Chat messages as token-id segments, through the tokenizer's own chat template.

The template is rendered once, with marks where the texts go, and cut at the marks. A prompt is then
joined from pieces, so that a shared segment has the same ids in every prompt; seams between pieces
lie at shared segments only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvcmas.engine.segments import Prompt, Segment, Visual, pf, ph
from kvcmas.errors import UserError
from workloads.base import Message, Slot, Text

SYSTEM_MARK, USER_MARK, REPLY_MARK = "\u2e28System\u2e29", "\u2e28User\u2e29", "\u2e28Reply\u2e29"
# Some templates print today's date; a prompt may not change from one day to the next.
_DATE = "26 Jul 2024"


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer with its chat template in pieces: ``head + system + middle + user + tail``.

    Where the template knows no system role, ``middle`` is an empty line and the system text leads
    the user's message. ``stop_ids`` end an agent's turn.
    """

    tokenizer: PreTrainedTokenizerBase
    head: str
    middle: str
    tail: str
    stop_ids: frozenset[int]

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int] = ()
    ) -> ChatFormat:
        """Cut ``tokenizer``'s template; ``eos_ids`` are those of the generation configuration.

        Raises:
            UserError: no chat template, one that changes or repeats the texts, or a tokenizer whose
                pieces do not join into the text.
        """
        if not tokenizer.chat_template:
            raise UserError(
                f"{_name(tokenizer)} has no chat template; use an instruction-tuned model"
            )
        content, (head, middle, tail) = _cut(tokenizer)
        chat = cls(tokenizer, head, middle, tail, _stop_ids(tokenizer, content, eos_ids))
        chat._check_joins()
        return chat

    @property
    def sha256(self) -> str:
        """Hash of the template as it enters prompts."""
        return hashlib.sha256("\0".join((self.head, self.middle, self.tail)).encode()).hexdigest()

    def encode_shared(self, text: str) -> tuple[int, ...]:
        """Ids of text from outside (question, observation). It cannot contain a control token."""
        return tuple(
            self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        )

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of generated ids, control tokens left out."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        if not isinstance(text, str):
            raise TypeError("one sequence of ids was decoded, several texts came back")
        return text

    def segments(
        self,
        message: Message,
        fills: Mapping[str, tuple[int, ...]],
        visuals: Mapping[str, tuple[Visual, ...]] | None = None,
    ) -> Prompt:
        """The prompt of ``message`` up to what the model adds.

        ``fills`` holds the ids of each slot that the message names.
        ``visuals`` are the images and videos among a slot's ids, where it has any.
        Neighbouring texts are joined with the template's own text and tokenised as one PF segment.
        Empty texts leave no segment; an empty fill leaves an empty PH segment.

        Raises:
            ValueError: the message names a slot that ``fills`` lacks.
        """
        segments: list[Segment] = []
        pending = self.head + message.system + self.middle
        for piece in (*message.user, Text(self.tail + message.reply)):
            if isinstance(piece, Text):
                pending += piece.text
                continue
            if piece.name not in fills:
                raise ValueError(
                    f"nothing fills slot {piece.name!r}; filled: {', '.join(fills) or 'none'}"
                )
            seen = (visuals or {}).get(piece.name, ())
            segments += [*self._own(pending), ph(piece.name, fills[piece.name], seen)]
            pending = ""
        return Prompt((*segments, *self._own(pending)))

    def render(self, message: Message, texts: Mapping[str, str]) -> str:
        """The same prompt as text, for people and logs."""
        user = "".join(p.text if isinstance(p, Text) else texts[p.name] for p in message.user)
        return f"{self.head}{message.system}{self.middle}{user}{self.tail}{message.reply}"

    def _own(self, text: str) -> list[Segment]:
        """The agent's own text, in which the template's control tokens count; no BOS is added."""
        return [pf(self.tokenizer.encode(text, add_special_tokens=False))] if text else []

    def _check_joins(self) -> None:
        """A tokenizer that marks word starts by itself would put a space at every seam."""
        message = Message("Be brief.", (Text("One:\n"), Slot("q"), Text("\nTwo.")))
        ids = self.segments(message, {"q": self.encode_shared("x = 1")}).ids
        joined = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if joined != self.render(message, {"q": "x = 1"}):
            raise UserError(
                f"the tokenizer of {_name(self.tokenizer)} adds or drops characters where segments "
                "join; byte-level ones (Llama 3, Qwen, SmolLM) do not"
            )


# How a message's text is handed to a template: most take a text, those of vision-language models
# often a list of parts.
Content = Callable[[str], Any]


def _plain(text: str) -> str:
    return text


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _cut(tokenizer: PreTrainedTokenizerBase) -> tuple[Content, tuple[str, str, str]]:
    """How the template takes texts, and its head, middle and tail."""
    for content in (_plain, _parts):
        user = {"role": "user", "content": content(USER_MARK)}
        system = {"role": "system", "content": content(SYSTEM_MARK)}
        try:
            if pieces := _split(_rendered(tokenizer, [system, user]), SYSTEM_MARK, USER_MARK):
                return content, (pieces[0], pieces[1], pieces[2])
        except TemplateError:
            pass  # the template refuses the system role
        if pieces := _split(_rendered(tokenizer, [user]), USER_MARK):
            return content, (pieces[0], "\n\n", pieces[1])
    raise UserError(f"the chat template of {_name(tokenizer)} changes or repeats its messages")


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or "the model"


def _stop_ids(
    tokenizer: PreTrainedTokenizerBase, content: Content, eos_ids: Iterable[int]
) -> frozenset[int]:
    """The given ids, the tokenizer's EOS and the control token that follows a reply."""
    ids = set(eos_ids)
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    turns = [
        {"role": "user", "content": content(USER_MARK)},
        {"role": "assistant", "content": content(REPLY_MARK)},
    ]
    after = _rendered(tokenizer, turns, reply=False).partition(REPLY_MARK)[2]
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids.update([i for i in tokenizer.encode(after, add_special_tokens=False) if i in control][:1])
    return frozenset(ids)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], reply: bool = True
) -> str:
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=reply, date_string=_DATE
    )
    assert isinstance(text, str)
    return text


def _split(text: str, *marks: str) -> list[str] | None:
    """``text`` without the marks, or None unless each occurs once and in this order."""
    pieces = re.split("|".join(map(re.escape, marks)), text)
    return (
        pieces
        if text == "".join(p + m for p, m in zip(pieces, (*marks, ""), strict=False))
        else None
    )
