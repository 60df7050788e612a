"""Passages from Wikipedia, looked up once and kept on disk, so that reruns see the same text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvcmas.errors import UserError
from kvcmas.paths import cache_dir
from workloads.retrieval import Passage

_AGENT = "kvcmas-repro (reproduction of arXiv 2609.34060)"


@dataclass(frozen=True)
class WikipediaPassages:
    """The summaries of the pages that Wikipedia's search finds for a term.

    Attributes:
        language: of the Wikipedia that is asked.
        folder: where answers are kept, one file per term; what is there is not asked again.
        client: what asks; None makes one, which needs the ``wikipedia`` extra, when it is needed.
    """

    language: str = "en"
    folder: Path = field(default_factory=lambda: cache_dir() / "wikipedia")
    client: Any = None

    @property
    def sha256(self) -> None:
        """Not known beforehand; what was seen is in the records."""
        return None

    def find(self, terms: Sequence[str], limit: int) -> list[Passage]:
        """See :class:`~workloads.retrieval.Passages`; first the best page of every term."""
        pages = [self._lookup(term, limit) for term in terms]
        ranked = (found[rank] for rank in range(limit) for found in pages if rank < len(found))
        return list(dict.fromkeys(ranked))[:limit]

    def _lookup(self, term: str, limit: int) -> list[Passage]:
        key = hashlib.sha256(f"{self.language}\0{term}\0{limit}".encode()).hexdigest()[:32]
        path = self.folder / f"{key}.json"
        try:
            if path.exists():
                return [Passage(**passage) for passage in json.loads(path.read_text())["passages"]]
            found = self._ask(term, limit)
            content = {
                "term": term,
                "language": self.language,
                "retrieved": datetime.now(UTC).isoformat(timespec="seconds"),
                "passages": [asdict(passage) for passage in found],
            }
            temporary = path.with_suffix(".tmp")
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content, indent=2))
            temporary.replace(path)
        except OSError as error:
            raise UserError(
                f"cannot keep Wikipedia's answer in {path}: {error.strerror}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged; delete it") from error
        return found

    def _ask(self, term: str, limit: int) -> list[Passage]:
        try:
            import wikipediaapi
        except ImportError as error:
            raise UserError(
                "Wikipedia needs the extra: pip install 'kvcmas-repro[wikipedia]'; or set "
                "retrieval to none or to a file of passages"
            ) from error
        client = self.client or wikipediaapi.Wikipedia(user_agent=_AGENT, language=self.language)
        try:
            pages = client.search(term, limit=limit).pages
            found = [Passage(title, page.summary.strip()) for title, page in pages.items()]
        except wikipediaapi.WikipediaException as error:
            raise UserError(
                f"Wikipedia cannot be asked about {term!r} ({error}); "
                "set retrieval to none or to a file of passages"
            ) from error
        return [passage for passage in found if passage.text]
