"""Pages and states: the memory that outlives a step, shared by all requests.

Needs torch. Lesson 07 looks into it, lesson 10 runs on it. What one sequence keeps in
:class:`~kimik3_lab.reference.state.SequenceState` lies here in tensors shared by all requests:

=============  =======================================  ==========================================
``latent``     ``[mla layer, block, page, 576]``        a row per token, found by the block table
``recurrent``  ``[layer of a group, row, H, V, K]``     float32 or wider, V-major as kernels want it
``conv``       ``[layer of a group, row, 3P, window]``  the last inputs of the convolution
=============  =======================================  ==========================================

With state groups (``CacheConfig.num_kda_groups``) the row of a state is the id of its block in the
scheduler's pool, and KDA layers are dealt to the groups in turn, as vLLM does: a block of one group
holds the states of all its layers. Without them a row is a slot that the executor hands out itself.

In vLLM a block's bytes serve pages and states alike. Here each kind has tensors of its own, with
the same numbers, so that block sizes too small for a state can be tried; a block holds one kind at
a time (:attr:`PagedCache.owner`). Rows that nobody has written take no memory on a CPU: the tensors
are allocated and not filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference.norms import compute_dtype
from kimik3_lab.serving.config import CacheConfig
from kimik3_lab.serving.executors.pinned import to_device
from kimik3_lab.serving.executors.step_counters import StepCounters

__all__ = ["KdaLayer", "PagedCache", "StateMove"]


class KdaLayer(NamedTuple):
    """Memory of one KDA layer: its group, ``[row, H, V, K]`` and ``[row, 3P, window]``."""

    group: int
    recurrent: Tensor
    conv: Tensor


class StateMove(NamedTuple):
    """A state to be copied: row to row, its window from another row and ``offset`` columns in."""

    state: int
    window: int
    offset: int
    target: int


class PagedCache:
    """All that outlives a step, for all requests.

    Parameters
    ----------
    config : K3Config
        Shape of the model.
    cache_config : CacheConfig
        Number and size of blocks and the groups, as the scheduler has them. Block 0 is the null
        block: what is padded reads it, and nothing writes it.
    num_slots : int
        Requests that can run at the same time.
    num_speculative_tokens : int
        K: a window keeps K inputs more, so that it can be set back. Without state groups a request
        also has K slots more, unless verification keeps records.
    counters : StepCounters, optional
        Where copies are counted.
    dtype, device
        Of the activations. Recurrent states are float32 or wider.

    Examples
    --------
    >>> cache = PagedCache(K3Config.micro(), CacheConfig(num_blocks=4), num_slots=2)
    >>> cache.latent.shape, cache.recurrent.shape
    (torch.Size([2, 4, 16, 48]), torch.Size([2, 3, 2, 16, 16]))
    """

    def __init__(
        self,
        config: K3Config,
        cache_config: CacheConfig,
        num_slots: int,
        *,
        num_speculative_tokens: int = 0,
        counters: StepCounters | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        linear, blocks = config.linear_attn_config, cache_config.num_blocks
        heads, width = linear.num_heads, linear.head_dim
        groups = max(cache_config.num_kda_groups, 1)
        layers = -(-len(config.kda_layer_ids) // groups)

        #: Places of a request for states that verification may fall back to.
        self.num_scratch = num_speculative_tokens * (cache_config.speculative_states == "slots")
        rows = blocks if cache_config.num_kda_groups else num_slots * (1 + self.num_scratch)
        rows += 1  # the last one belongs to nobody: row -1 is that of the empty requests
        self.counters = counters or StepCounters()
        self.history = linear.short_conv_kernel_size - 1
        self.num_attention_groups = cache_config.num_attention_groups
        self.num_state_groups = groups
        # Context parallelism spreads a page over ranks; on one device it is simply longer.
        self.page_size = cache_config.scheduler_block_size
        mla_layers = len(config.mla_layer_ids)
        self.latent = torch.empty(
            mla_layers, blocks, self.page_size, config.mla_cache_dim, dtype=dtype, device=device
        )
        self.latent[:, 0] = 0
        self.recurrent = torch.empty(
            layers, rows, heads, width, width, dtype=compute_dtype(dtype), device=device
        )
        window = self.history + num_speculative_tokens
        self.conv = torch.empty(
            layers, rows, 3 * linear.projection_size, window, dtype=dtype, device=device
        )
        self.recurrent[:, -1], self.conv[:, -1] = 0, 0
        # Row s names the blocks of the request in slot s, for each attention group. One row more,
        # of null blocks, belongs to the requests that a recorded step is filled up with.
        self.padding_slot = num_slots
        self.block_table = torch.zeros(
            self.num_attention_groups,
            num_slots + 1,
            cache_config.num_usable_blocks,
            dtype=torch.int64,
            device=device,
        )
        #: The group whose table named each block last, -1 for none: what its content is.
        self.owner = [-1] * blocks
        self._kda_index = {layer: i for i, layer in enumerate(config.kda_layer_ids)}
        self._mla_index = {layer: i for i, layer in enumerate(config.mla_layer_ids)}

    # -- layers --------------------------------------------------------------------------------

    def kda_layer(self, layer_id: int) -> KdaLayer:
        """Memory of a KDA layer. The j-th is in group ``j % G``: vLLM's ``layers[i::G]``."""
        index, group = divmod(self._kda_index[layer_id], self.num_state_groups)
        return KdaLayer(group, self.recurrent[index], self.conv[index])

    def mla_layer(self, layer_id: int) -> tuple[int, Tensor]:
        """Attention group of an MLA layer, and its rows ``[cell, 576]``, blocks end to end."""
        index = self._mla_index[layer_id]
        return index % self.num_attention_groups, self.latent[index].flatten(0, 1)

    def cells(self, group: int, slots: Tensor | int, length: int) -> Tensor:
        """Return the numbers of the first ``length`` rows of requests, blocks laid end to end.

        ``slots`` are rows of :attr:`block_table`: int64 ``[n]``, or one number. The result has a
        dimension ``length`` more.
        """
        blocks = self.block_table[group, slots, : -(-length // self.page_size)].unsqueeze(-1)
        cells = blocks * self.page_size + torch.arange(self.page_size, device=blocks.device)
        return cells.flatten(-2)[..., :length]

    # -- blocks --------------------------------------------------------------------------------

    def set_blocks(
        self, slot: int, first: int, block_ids: Sequence[int], *, group: int = 0
    ) -> None:
        """Enter ``block_ids`` into the table of ``slot`` from its block number ``first`` on."""
        if block_ids:
            row = self.block_table[group, slot, first : first + len(block_ids)]
            to_device(block_ids, out=row)
            self.own(group, block_ids)

    def own(self, group: int, block_ids: Iterable[int]) -> None:
        """Note that from now on these blocks hold what ``group`` puts there."""
        for block_id in block_ids:
            self.owner[block_id] = group

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in all layers of their group, in this order."""
        for source, target in pairs:
            group = self.owner[source]
            if group < 0:
                raise RuntimeError(
                    f"block {source} is to be copied to {target}, but no table ever named it: "
                    "were all plans of the scheduler executed, in their order?"
                )
            if group < self.num_attention_groups:
                layers = slice(group, None, self.num_attention_groups)
                self.latent[layers, target] = self.latent[layers, source]
            else:
                self.recurrent[:, target] = self.recurrent[:, source]
                self.conv[:, target] = self.conv[:, source]
            self.owner[target] = group
            self.counters.block_copies += 1

    # -- states --------------------------------------------------------------------------------

    def reset_states(self, rows: Sequence[int]) -> None:
        """Empty states and windows: the requests that get these rows start from zero."""
        if rows:
            index = to_device(rows, self.conv.device)
            self.recurrent.index_fill_(1, index, 0)
            self.conv.index_fill_(1, index, 0)

    def move_states(self, moves: Sequence[StateMove]) -> None:
        """Copy states, and the windows that belong to them, to the front of their new rows."""
        if moves:
            numbers = to_device([number for move in moves for number in move], self.conv.device)
            self.move_state_rows(*numbers.view(-1, 4).unbind(1))

    def move_state_rows(
        self, state: Tensor, window: Tensor, offset: Tensor, target: Tensor
    ) -> None:
        """Copy states as :meth:`move_states` does, with the fields of the moves on the device."""
        # All is read before anything is written: rows may change places.
        states, windows = self.recurrent[:, state], self.windows(self.conv[:, window], offset)
        self.recurrent[:, target] = states
        self.conv[:, target, :, : self.history] = windows
        self.counters.kda_state_bytes_copied += states.nbytes
        self.counters.conv_bytes_copied += windows.nbytes

    def windows(self, wide: Tensor, offset: Tensor) -> Tensor:
        """Cut each request's window out of its ``wide [..., n, 3P, L]``, ``offset [n]`` in."""
        columns = offset.unsqueeze(-1) + torch.arange(self.history, device=wide.device)
        columns = columns.unsqueeze(-2).expand(*wide.shape[:-1], self.history)
        return wide.gather(-1, columns)

    @property
    def nbytes(self) -> int:
        """Bytes of latent rows, states and windows."""
        return self.latent.nbytes + self.recurrent.nbytes + self.conv.nbytes
