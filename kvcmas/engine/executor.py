"""One executor runs any row schedule (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcmas.engine.accounting import Accounting, account
from kvcmas.engine.adapter import ModelAdapter
from kvcmas.engine.attention import Rows
from kvcmas.engine.cache import Buffer, ContiguousBuffer, Origin
from kvcmas.engine.contract import Candidates, Enter, Fill, Leave, Plan, Select
from kvcmas.engine.inputs import InputRows
from kvcmas.engine.received import Received
from kvcmas.engine.segments import Prompt
from kvcmas.errors import UserError


@dataclass(frozen=True)
class Prefill:
    """A filled buffer, logits ``[1, vocab]`` of the last row (or of all rows), the accounting."""

    buffer: ContiguousBuffer
    logits: Tensor
    accounting: Accounting


@dataclass(frozen=True)
class Work:
    """What a prefill executed: ``touched [rows]`` went through a layer; see ``Accounting``."""

    touched: Tensor
    row_layers: int
    flops: int


@dataclass
class _Active:
    """Rows in flight: positions, residual rows ``[rows, hidden]``, and which scatter K and V."""

    rows: Rows
    hidden: Tensor
    write: Tensor

    def keep(self, mask: Tensor) -> None:
        """Narrow to ``mask [rows]`` (host booleans)."""
        if not bool(mask.all()):
            index = mask.nonzero().squeeze(1)
            self.rows = Rows(self.rows.host[index], self.hidden.device)
            self.hidden = self.hidden[index.to(self.hidden.device)]
            self.write = self.write[index]


class Executor:
    """Runs plans on one model. Stateless between turns."""

    def __init__(self, model: ModelAdapter) -> None:
        self.model = model

    @torch.inference_mode()
    def run(
        self,
        prompt: Prompt,
        plan: Plan,
        *,
        new_tokens: int = 0,
        hidden_layers: Sequence[int] = (),
        received: bool = False,
        all_logits: bool = False,
    ) -> Prefill:
        """Prefill ``prompt`` as ``plan`` says.

        Args:
            new_tokens: rows of the buffer kept free for decoding.
            hidden_layers: layers before which residual rows are kept in ``buffer.hidden``.
            received: see :meth:`collect_received`, from this prefill on.
            all_logits: logits of every row; all rows must be active in the last layer.

        Raises:
            UserError: the prompt and its new tokens exceed the model's context.
            ValueError: the plan leaves an entry unwritten or does not fit the prompt.
        """
        spec = self.model.spec
        if len(prompt) + new_tokens > spec.max_positions:
            raise UserError(
                f"the context of {len(prompt)} prompt and {new_tokens} new tokens is longer than"
                f" the model's {spec.max_positions} positions"
            )
        buffer = self.new_buffer(len(prompt), new_tokens)
        wanted = torch.full((len(prompt),), all_logits)
        wanted[-1] = True
        hidden, work = self._prefill(buffer, prompt, plan, wanted, hidden_layers, received)
        logits = self.model.logits(hidden)
        flops = work.flops + 2 * spec.hidden * spec.vocab * len(hidden)
        counted = account(prompt, buffer.origin, work.touched, work.row_layers, flops)
        return Prefill(buffer, logits, counted)

    @torch.inference_mode()
    def run_before(
        self,
        stop: int,
        buffer: Buffer,
        prompt: Prompt,
        plan: Plan,
        *,
        hidden_layers: Sequence[int] = (),
        received: bool = False,
    ) -> Work:
        """Carry out ``plan`` for the rows before ``stop`` in a given buffer; somebody else goes on.

        Raises:
            ValueError: the plan leaves one of these entries unwritten, fills rows after ``stop``
                (other than the prompt's last), or does not fit the prompt.
        """
        if late := [fill for fill in plan.fills if beyond(fill, prompt, stop)]:
            raise ValueError(f"segment {late[0].segment} is filled beyond row {stop}")
        wanted = torch.zeros(len(prompt), dtype=torch.bool)
        before = replace(
            plan, events=tuple(_before(e, stop) if isinstance(e, Enter) else e for e in plan.events)
        )
        _, work = self._prefill(buffer, prompt, before, wanted, hidden_layers, received)
        if unset := int((buffer.origin[:, :stop] == Origin.UNSET).sum()):
            raise ValueError(f"{unset} (layer, row) entries before row {stop} were never written")
        return work

    def _prefill(
        self,
        buffer: Buffer,
        prompt: Prompt,
        plan: Plan,
        wanted: Tensor,
        hidden_layers: Sequence[int],
        received: bool,
    ) -> tuple[Tensor, Work]:
        """Residual rows after the last layer of the ``wanted [rows]``, and what it took."""
        _check(prompt, plan)
        spec = self.model.spec
        self._relay_hidden(buffer, prompt, plan, hidden_layers)
        if received:
            self.collect_received(buffer, prompt, plan)
        inputs = InputRows(self.model, prompt)
        active = _Active(
            Rows(torch.empty(0, dtype=torch.long), spec.device),
            torch.empty(0, spec.hidden, dtype=spec.dtype, device=spec.device),
            torch.empty(0, dtype=torch.bool),
        )
        touched = torch.zeros(len(prompt), dtype=torch.bool)
        row_layers = flops = 0
        for layer in range(spec.layers):
            for fill in plan.fills:
                write_fill(buffer, prompt.rows(fill.segment), fill, layer)
            for event in plan.events:
                if isinstance(event, Enter) and event.layer == layer:
                    self._enter(active, event, inputs)
            if not len(active.rows):
                continue
            if layer in buffer.hidden:
                buffer.hidden[layer][active.rows.positions] = active.hidden
            touched[active.rows.host] = True
            kv_rows = len(active.rows)
            normed = self._scatter(buffer, active, plan, layer)
            stays = (
                wanted[active.rows.host]
                if layer == spec.layers - 1
                else _stays(active, plan, layer)
            )
            if normed.shape[0] != len(active.rows) or not bool(stays.all()):
                self._observe(buffer, active, ~stays, layer)
                active.keep(stays)
                normed = self.model.input_norm(layer, active.hidden)
            if len(active.rows):
                active.hidden = self._layer(buffer, active.rows, active.hidden, normed, layer)
            row_layers += kv_rows
            flops += spec.layer_flops(kv_rows, len(active.rows), active.rows.attended)
        if not torch.equal(active.rows.host, wanted.nonzero().squeeze(1)):
            raise ValueError("a row whose logits are wanted is not active in the last layer")
        return active.hidden, Work(touched, row_layers, flops)

    @torch.inference_mode()
    def extend(
        self, buffer: ContiguousBuffer, ids: Sequence[int], *, logits: int | None = None
    ) -> Tensor:
        """Append tokens to a filled buffer, densely; returns their logits ``[tokens, vocab]``.

        One token at a time this is decoding; with a known continuation it is teacher forcing.

        Args:
            logits: of how many tokens, from the first; None for all. A vocabulary is wide: for a
                small model these products are a quarter of the work.

        Raises:
            ValueError: no room left in the buffer.
        """
        spec, start = self.model.spec, buffer.length
        if start + len(ids) > buffer.capacity:
            raise ValueError(
                f"no room for {len(ids)} tokens after {start} of {buffer.capacity} rows"
            )
        rows = Rows(torch.arange(start, start + len(ids)), spec.device)
        hidden = self.model.embed(torch.tensor(list(ids), device=spec.device))
        for layer in range(spec.layers):
            if layer in buffer.hidden:
                buffer.hidden[layer][rows.positions] = hidden
            normed = self.model.input_norm(layer, hidden)
            k, v = self.model.project_kv(layer, normed)
            buffer.write(layer, rows, self.model.rope.make(k, rows.positions), v)
            hidden = self._layer(buffer, rows, hidden, normed, layer)
        buffer.length += len(ids)
        return self.model.logits(hidden[:logits])

    def new_buffer(self, rows: int, new_tokens: int = 0) -> ContiguousBuffer:
        """An unfilled buffer for ``rows`` prompt rows and ``new_tokens`` more."""
        spec = self.model.spec
        shape = (spec.layers, spec.kv_heads, rows + new_tokens, spec.head_dim)
        return ContiguousBuffer(shape, rows, self.model.rope, spec.dtype, spec.device)

    def _relay_hidden(
        self, buffer: Buffer, prompt: Prompt, plan: Plan, hidden_layers: Sequence[int]
    ) -> None:
        """Rows that do not reach a captured layer pass on their source's residual rows."""
        spec = self.model.spec
        for layer in hidden_layers:
            # Whoever reads a row that nobody delivers shall notice.
            hidden = torch.full(
                (buffer.capacity, spec.hidden), torch.nan, dtype=spec.dtype, device=spec.device
            )
            for fill in plan.fills:
                if prompt.segments[fill.segment].kind == "PH":
                    rows = prompt.rows(fill.segment)
                    hidden[rows.start : rows.stop] = fill.cache.residual(layer)
            buffer.hidden[layer] = hidden

    def collect_received(self, buffer: Buffer, prompt: Prompt, plan: Plan) -> None:
        """Keep in ``buffer.received`` the attention that executed queries give from now on.

        First-seen PH and the output collect; filled PH pass on what their source holds.
        """
        collecting = torch.ones(buffer.capacity, dtype=torch.bool)
        for i, segment in enumerate(prompt.segments):
            rows = prompt.rows(i)
            collecting[rows.start : rows.stop] = segment.kind == "PH"
        for fill in plan.fills:
            rows = prompt.rows(fill.segment)
            collecting[rows.start : rows.stop] = False
        buffer.received = Received(collecting, self.model.spec.device)
        for fill in plan.fills:
            if fill.cache.received is not None:
                rows = prompt.rows(fill.segment)
                buffer.received.total[rows.start : rows.stop] = fill.cache.received

    def _enter(self, active: _Active, event: Enter, inputs: InputRows) -> None:
        hidden = event.hidden
        if hidden is None:
            if event.layer > 0:
                raise ValueError(f"rows enter at layer {event.layer} without residual rows")
            hidden = inputs(event.rows)
        elif len(hidden) != len(event.rows):
            raise ValueError(f"{len(event.rows)} rows enter with {len(hidden)} residual rows")
        rows = torch.cat((active.rows.host, event.rows))
        merged = torch.cat((active.hidden, hidden))
        write = torch.cat((active.write, torch.full((len(event.rows),), event.write)))
        if not bool((rows.diff() > 0).all()):
            order = rows.argsort()
            rows, merged, write = rows[order], merged[order.to(merged.device)], write[order]
            if bool((rows.diff() == 0).any()):
                raise ValueError(f"a row enters at layer {event.layer} that is active already")
        active.rows, active.hidden, active.write = Rows(rows, merged.device), merged, write

    def _scatter(self, buffer: Buffer, active: _Active, plan: Plan, layer: int) -> Tensor:
        """Write the active rows' K and V, after any selection; returns their normed rows."""
        device = active.hidden.device
        normed = self.model.input_norm(layer, active.hidden)
        k, v = self.model.project_kv(layer, normed)
        k = self.model.rope.make(k, active.rows.positions)
        write, keep = active.write.clone(), torch.ones(len(active.rows), dtype=torch.bool)
        for event in plan.events:
            if not (isinstance(event, Select) and event.layer == layer):
                continue
            rows = event.rows[torch.isin(event.rows, active.rows.host)]
            at = torch.searchsorted(active.rows.host, rows)
            index, held = at.to(device), buffer.read(layer, Rows(rows, device))
            chosen = event.choose(Candidates(layer, rows, k[:, index], v[:, index], *held))
            kept = torch.isin(rows, chosen.cpu())
            keep[at] = kept
            active.write[at] = kept
            write[at] = kept | event.write_all
        if bool(write.all()):
            written = active.rows
        else:
            index = write.nonzero().squeeze(1)
            written = Rows(active.rows.host[index], device)
            k, v = k[:, index.to(device)], v[:, index.to(device)]
        buffer.write(layer, written, k, v)
        buffer.origin[layer, written.host] = Origin.EXECUTED
        active.keep(keep)
        return normed

    def _layer(
        self, buffer: Buffer, rows: Rows, hidden: Tensor, normed: Tensor, layer: int
    ) -> Tensor:
        q = self._queries(buffer, rows, normed, layer)
        return self.model.finish(layer, hidden, buffer.attend(layer, q, rows))

    def _queries(self, buffer: Buffer, rows: Rows, normed: Tensor, layer: int) -> Tensor:
        q = self.model.rope.make(self.model.project_q(layer, normed), rows.positions)
        if buffer.received is not None and len(rows):
            k, _ = buffer.prefix(layer, int(rows.host[-1]) + 1)
            buffer.received.observe(q, rows, k)
        return q

    def _observe(self, buffer: Buffer, active: _Active, leaves: Tensor, layer: int) -> None:
        """Nothing else of rows that leave is needed, but the attention they give is."""
        if buffer.received is None or not buffer.received.reached_by(active.rows):
            return
        index = leaves.nonzero().squeeze(1)
        rows = Rows(active.rows.host[index], active.hidden.device)
        normed = self.model.input_norm(layer, active.hidden[index.to(active.hidden.device)])
        self._queries(buffer, rows, normed, layer)


def write_fill(buffer: Buffer, rows: range, fill: Fill, layer: int) -> None:
    """Write one layer of a fill into ``rows``: source, correction, keys moved to their place."""
    k, v = buffer.window(layer, rows)
    origin = buffer.origin[layer, rows.start : rows.stop]
    k.copy_(fill.cache.k[layer])
    v.copy_(fill.cache.v[layer])
    origin.fill_(Origin.REUSED)
    # Layer 0 depends on token and position only, so its delta is zero.
    if fill.correction is not None and layer > 0:
        covered = fill.correction.rows
        fill.correction.apply(layer, k[:, :covered], v[:, :covered])
        origin[:covered] = Origin.CORRECTED
    buffer.rope.align_(k, rows.start)
    buffer.commit(layer, rows, k, v)


def _stays(active: _Active, plan: Plan, layer: int) -> Tensor:
    """Rows still active in the next layer; the others only needed their K and V."""
    stays = torch.ones(len(active.rows), dtype=torch.bool)
    for event in plan.events:
        if isinstance(event, Leave) and event.layer == layer + 1:
            stays &= ~torch.isin(active.rows.host, event.rows)
    return stays


def beyond(fill: Fill, prompt: Prompt, stop: int) -> bool:
    """Whether ``fill`` reaches rows from ``stop`` on, other than the prompt's last."""
    end = prompt.rows(fill.segment).stop
    return min(end, len(prompt) - 1) > stop


def _before(event: Enter, stop: int) -> Enter:
    inside = event.rows < stop
    if bool(inside.all()):
        return event
    hidden = event.hidden
    return replace(
        event,
        rows=event.rows[inside],
        hidden=None if hidden is None else hidden[inside.to(hidden.device)],
    )


def _check(prompt: Prompt, plan: Plan) -> None:
    seen: set[int] = set()
    for fill in plan.fills:
        if fill.segment in seen:
            raise ValueError(f"segment {fill.segment} is filled twice")
        seen.add(fill.segment)
        if len(fill.cache) != len(prompt.segments[fill.segment]):
            raise ValueError(
                f"segment {fill.segment} has {len(prompt.segments[fill.segment])} tokens,"
                f" its cache {len(fill.cache)}"
            )
