"""`repro lm-eval`: any task of lm-eval through the agents, under any method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from kvcmas.errors import UserError
from repro.commands.console import output_console
from repro.commands.settings import check_writable, parse_settings

TASKS = Path(__file__).resolve().parent.parent / "lm_eval" / "tasks"


@dataclass(frozen=True)
class Request:
    """The command line of `repro lm-eval`."""

    tasks: str
    method: str = "kvcmas"
    model: str = "smollm2-135m"
    agents: str = "any"
    max_new_tokens: int = 64
    limit: int | None = None
    num_fewshot: int | None = None
    data: str | None = None
    include: Path | None = None
    out: Path | None = None
    set: Sequence[str] = ()


def run(request: Request) -> None:
    """Evaluate, print one row per metric and, if asked, write lm-eval's results as JSON.

    Raises:
        UserError: lm-eval is not installed, an unknown task, model, method or setting.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from repro.lm_eval.model import WorkflowLM
    except ImportError as error:
        raise UserError("lm-eval is not installed; pip install 'kvcmas-repro[lm-eval]'") from error
    if request.out is not None:
        check_writable(request.out)
    names = [name.strip() for name in request.tasks.split(",") if name.strip()]
    folders: list[str | Path] = [TASKS, *([request.include] if request.include else [])]
    manager = TaskManager(include_path=folders, metadata={"data": request.data})
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise UserError(f"lm-eval has no task {unknown[0]!r}; `lm-eval ls tasks` lists them")
    if not names:
        raise UserError("no task was named")
    model = WorkflowLM(
        pretrained=request.model,
        method=request.method,
        agents=request.agents,
        max_new_tokens=request.max_new_tokens,
        **parse_settings(request.set),
    )
    evaluated = simple_evaluate(
        model=model,
        tasks=list(names),
        task_manager=manager,
        num_fewshot=request.num_fewshot,
        limit=request.limit,
        bootstrap_iters=0,
    )
    if evaluated is None:
        raise UserError("lm-eval gave no results")
    results: dict[str, dict[str, Any]] = evaluated["results"]
    _show(results, request, model.rho)
    if request.out is not None:
        _write(request.out, request, results, model.rho)


def _show(results: dict[str, dict[str, Any]], request: Request, rho: float | None) -> None:
    console = output_console()
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("task", "metric", "filter", "value", "n"):
        table.add_column(heading)
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, chosen = key.partition(",")
            if chosen and isinstance(value, int | float) and not name.endswith("_stderr"):
                n = str(metrics.get("sample_len", ""))
                table.add_row(task, name, chosen, f"{value:.4f}", n)
    console.print(table)
    reused = "nothing could be reused" if rho is None else f"rho {rho:.3f}"
    console.print(f"{request.method} on {request.model}, agents: {request.agents}; {reused}")


def _write(
    out: Path, request: Request, results: dict[str, dict[str, Any]], rho: float | None
) -> None:
    path = out / f"lm-eval-{request.method.replace(':', '.')}.json"
    content = {
        "method": request.method,
        "model": request.model,
        "agents": request.agents,
        "max_new_tokens": request.max_new_tokens,
        "limit": request.limit,
        "settings": parse_settings(request.set),
        "rho": rho,
        "results": results,
    }
    try:
        path.write_text(json.dumps(content, indent=2, default=str))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    Console(stderr=True).print(f"results are in {path}")
