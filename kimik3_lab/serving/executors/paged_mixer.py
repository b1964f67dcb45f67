"""The mixer of many sequences: one call serves all requests of a step.

Needs torch. Lesson 10 runs it; lesson 07 shows the cache behind it.

A step has up to three classes of rows, see :mod:`~kimik3_lab.serving.executors.step_metadata`. All
requests that verify drafts or decode go through one recurrence and one attention over padded rows,
so a step of sixteen costs little more than a step of one; chunks of prompts come one after the
other in the forms made for prefill. How a KDA layer gets at the rows of a class is the switch
:attr:`~kimik3_lab.serving.executors.execution.ExecutionConfig.mixed_batch`.

Another backend overrides the methods with a leading underscore: one for each operator and class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference import kda, mla
from kimik3_lab.serving.executors import kda_records
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.kda_states import Commit, CommitTensors
from kimik3_lab.serving.executors.paged_attention import absorbed_decode, absorbing_pays
from kimik3_lab.serving.executors.paged_cache import KdaLayer, PagedCache
from kimik3_lab.serving.executors.step_metadata import StepMetadata
from kimik3_lab.serving.executors.step_parts import Decodes, Part, Prefill

__all__ = ["PagedMixer"]


class PagedMixer:
    """A :class:`~kimik3_lab.reference.mixer.Mixer` over a :class:`PagedCache`.

    Set :attr:`step` before each forward pass, and call :meth:`commit` when drafts are verified.

    Parameters
    ----------
    config : K3Config
        Shape of the model.
    cache : PagedCache
        Read and advanced by each step. Its counters count.
    execution : ExecutionConfig, optional
        The switches.
    """

    step: StepMetadata

    def __init__(
        self, config: K3Config, cache: PagedCache, execution: ExecutionConfig | None = None
    ) -> None:
        self.config, self.cache = config, cache
        self.execution = execution or ExecutionConfig()
        self.counters = cache.counters

    # -- the protocol --------------------------------------------------------------------------

    def conv(self, layer_id: int, u: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.conv`."""
        layer = self.cache.kda_layer(layer_id)

        def operator(part: Part, u: Tensor) -> Tensor:
            if isinstance(part, Decodes):
                return self._conv_decodes(part, layer, u, weight)
            return self._conv_prefill(part, layer, u, weight)

        return self._by_class(operator, u)

    def kda(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.kda`."""
        layer = self.cache.kda_layer(layer_id)

        def operator(part: Part, *inputs: Tensor) -> Tensor:
            if isinstance(part, Decodes):
                return self._kda_decodes(part, layer, layer_id, inputs)
            return self._kda_prefill(part, layer, inputs)

        return self._by_class(operator, q, k, v, g, beta)

    def mla(
        self, layer_id: int, q: Tensor, latent: Tensor, kv_b: Tensor, config: K3Config
    ) -> Tensor:
        """See :meth:`kimik3_lab.reference.mixer.Mixer.mla`."""
        group, cached = self.cache.mla_layer(layer_id)
        cached.index_copy_(0, self.step.cell_mapping[group], latent)
        outputs = []
        for part in self.step.parts:
            operator = self._mla_decodes if isinstance(part, Decodes) else self._mla_prefill
            for context in part.contexts[group]:
                self.counters.launches += 1
                rows = cached.index_select(0, context.cells.flatten())
                rows = rows.view(*context.cells.shape, -1)  # twice as fast as cached[cells]
                outputs.append(operator(q[context.rows], rows, kv_b, context.hidden))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    # -- rows of a class -----------------------------------------------------------------------

    def _by_class(self, operator: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Give each part its rows of ``inputs [N, ...]``, and put the results together."""
        parts = self.step.parts
        self.counters.launches += len(parts)
        if len(parts) == 1:
            return operator(parts[0], *inputs)
        gathers = self.step.is_mixed and self.execution.mixed_batch == "gather"
        joined: Tensor | None = None
        for part in parts:
            if gathers:
                index = torch.arange(part.rows.start, part.rows.stop, device=inputs[0].device)
                rows = [x.index_select(0, index) for x in inputs]
                self.counters.gather_bytes += sum(x.nbytes for x in rows)
            else:
                rows = [x[part.rows] for x in inputs]
            output = operator(part, *rows)
            if joined is None:
                joined = output.new_empty(self.step.num_rows, *output.shape[1:])
            if gathers:
                joined.index_copy_(0, index, output)
                self.counters.gather_bytes += output.nbytes
            else:
                joined[part.rows] = output  # where a kernel would write to begin with
        assert joined is not None
        return joined

    # -- KDA -----------------------------------------------------------------------------------

    def _conv_decodes(self, part: Decodes, layer: KdaLayer, u: Tensor, weight: Tensor) -> Tensor:
        """Convolve ``num_tokens`` rows of each request; its window stays wide enough for any."""
        u, rows = _rectangle(u, part.num_tokens), part.state_rows[layer.group][:, 0]
        window = self.cache.windows(layer.conv[rows], part.num_accepted - 1)
        y, _ = kda.short_conv(u, weight, window)
        # With n tokens accepted the next window begins at column n - 1.
        inputs = torch.cat((window[..., 1:], u.mT), -1)
        layer.conv[rows, :, : inputs.shape[-1]] = inputs
        return y.flatten(0, 1)

    def _conv_prefill(self, part: Prefill, layer: KdaLayer, u: Tensor, weight: Tensor) -> Tensor:
        row, history = part.state_rows[layer.group], self.cache.history
        window = layer.conv[row, :, :history].clone()
        y, layer.conv[row, :, :history] = kda.short_conv(u, weight, window)
        if part.checkpoint_at:
            inputs, stop = torch.cat((window, u.mT), -1), part.checkpoint_at + history
            target = part.checkpoint_rows[layer.group]
            layer.conv[target, :, :history] = inputs[:, part.checkpoint_at : stop]
        return y

    def _kda_decodes(
        self, part: Decodes, layer: KdaLayer, layer_id: int, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Run the recurrence; keep the state after each token, or records, or the only one."""
        rows = part.state_rows[layer.group]
        start = rows.gather(1, part.num_accepted.unsqueeze(-1) - 1).squeeze(-1)
        before = kda.from_cache_layout(layer.recurrent[start])
        q, k, v, g, beta = (_rectangle(x, part.num_tokens) for x in inputs)
        o, states, records = kda_records.verify(q, k, v, g, beta, before)
        if part.kind == "verify" and not self.cache.num_scratch:
            self.step.records.setdefault(layer_id, []).append(records)
        else:
            layer.recurrent[rows[:, : part.num_tokens]] = kda.to_cache_layout(states)
            self.counters.kda_state_writes += len(rows) * part.num_tokens
        return o.flatten(0, 1)

    def _kda_prefill(self, part: Prefill, layer: KdaLayer, inputs: Sequence[Tensor]) -> Tensor:
        row, at = part.state_rows[layer.group], part.checkpoint_at
        q, k, v, g, beta = (x.unsqueeze(0) for x in inputs)  # a batch of one request
        before = kda.from_cache_layout(layer.recurrent[row]).unsqueeze(0)
        o, after, kept = kda.chunked(q, k, v, g, beta, before, checkpoint_at=(at,) if at else ())
        layer.recurrent[row] = kda.to_cache_layout(after.squeeze(0))
        if at:
            target = part.checkpoint_rows[layer.group]
            layer.recurrent[target] = kda.to_cache_layout(kept[at].squeeze(0))
        self.counters.kda_state_writes += 2 if at else 1
        return o.squeeze(0)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Make the accepted tokens final in states and windows, from the records of the step.

        Parameters
        ----------
        commits : sequence of Commit
            One for each request of the step that verified drafts, in the order of its rows.
        """
        if commits:
            self.commit_tensors(CommitTensors.send(commits, self.cache.conv.device))

    def commit_tensors(self, commits: CommitTensors) -> None:
        """Do what :meth:`commit` does for numbers that are on the device."""
        verified = [p for p in self.step.parts if isinstance(p, Decodes) and p.kind == "verify"]
        low, number = 0, len(commits.num_accepted)
        for index, part in enumerate(verified):
            # A recorded step may have empty requests behind the others.
            high = min(low + len(part.num_accepted), number)
            self._commit_part(part, index, commits.members(low, high))
            self.counters.recovery_commits += high - low
            low = high

    def _commit_part(self, part: Decodes, index: int, members: CommitTensors) -> None:
        count, boundary = members.num_accepted, members.boundary
        crossing = None if boundary is None else boundary.nonzero().squeeze(-1)
        for layer_id, records in self.step.records.items():
            layer = self.cache.kda_layer(layer_id)
            rows = part.state_rows[layer.group][: len(count), 0]
            # Read before either is written: a boundary may lie in the row that all starts from.
            before, wide = kda.from_cache_layout(layer.recurrent[rows]), layer.conv[rows]
            targets: list[tuple[Tensor, Tensor | slice, Tensor]] = [(rows, slice(len(rows)), count)]
            if crossing is not None:
                assert boundary is not None and members.boundary_rows is not None
                boundary_rows = members.boundary_rows[layer.group]
                targets.insert(0, (boundary_rows[crossing], crossing, boundary[crossing]))
            for target, chosen, number in targets:
                after = kda_records.commit(before[chosen], records[index].of(chosen), number)
                window = self.cache.windows(wide[chosen], number - 1)
                layer.recurrent[target] = kda.to_cache_layout(after)
                layer.conv[target, :, : self.cache.history] = window
                self.counters.kda_state_writes += len(target)
                self.counters.conv_bytes_copied += window.nbytes

    # -- MLA -----------------------------------------------------------------------------------

    def _mla_decodes(self, q: Tensor, rows: Tensor, kv_b: Tensor, hidden: Tensor | None) -> Tensor:
        """Attend with the same number of queries of each request; cached ``rows [n, L, width]``."""
        q = _rectangle(q, len(q) // len(rows))
        return absorbed_decode(q, rows, kv_b, hidden).flatten(0, 1)

    def _mla_prefill(self, q: Tensor, rows: Tensor, kv_b: Tensor, hidden: Tensor | None) -> Tensor:
        """Attend with the last queries of one sequence, in the form with fewer multiplications."""
        pays = absorbing_pays(len(q), len(rows), self.config)
        return (mla.absorbed if pays else mla.expanded)(q, rows, kv_b)


def _rectangle(x: Tensor, num_tokens: int) -> Tensor:
    """``[n * T, ...]`` to ``[n, T, ...]``."""
    return x.view(-1, num_tokens, *x.shape[1:])
