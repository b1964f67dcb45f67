"""One pool for two shapes: pages of equal size, groups of equally many layers.

Needs the standard library only. Lesson 07 works out K3's groups. The rules are vLLM's, see
``Platform.update_block_size_for_backend`` in ``vllm/platforms/interface.py`` (the page) and
``_get_kv_cache_groups_uniform_page_size`` in ``vllm/v1/core/kv_cache_utils.py`` (the groups).

A block id must be good for rows of MLA layers as for states of KDA layers. So the block is made so
long that its rows take at least as many bytes as a state, the state is padded to it, and layers are
put in groups of equal number, the last one of a kind filled up with layers that do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["KVCacheGroups", "PageSize", "group_layers", "kda_state_bytes", "unify_page_size"]

#: MLA kernels take rows in units of this many tokens.
KERNEL_ALIGNMENT = 128


@dataclass(frozen=True)
class PageSize:
    """The page that both kinds of layers use.

    Attributes
    ----------
    block_size : int
        Tokens of a block.
    page_bytes : int
        Bytes of a block in one layer.
    state_bytes : int
        Those of them that a KDA state takes.
    """

    block_size: int
    page_bytes: int
    state_bytes: int

    @property
    def padding(self) -> float:
        """Bytes that a state's page has too many, as a share of the state: what vLLM logs."""
        return self.page_bytes / self.state_bytes - 1.0


def kda_state_bytes(
    num_heads: int,
    head_dim: int,
    conv_kernel_size: int,
    num_speculative_tokens: int = 0,
    *,
    conv_itemsize: int = 2,
    state_itemsize: int = 4,
) -> int:
    """Bytes of one layer's state: the inputs that the convolution still needs, and the matrices.

    Parameters
    ----------
    num_heads : int
        Heads on this rank.
    num_speculative_tokens : int
        K: with drafts the convolution keeps K inputs more, so that it can be set back.
    conv_itemsize, state_itemsize : int
        Bytes of a value.

    Examples
    --------
    >>> kda_state_bytes(12, 128, 4)  # K3 on one of eight ranks
    814080
    """
    window = 3 * num_heads * head_dim * (conv_kernel_size - 1 + num_speculative_tokens)
    return window * conv_itemsize + num_heads * head_dim * head_dim * state_itemsize


def unify_page_size(
    state_bytes: int, row_bytes: int, alignment: int = KERNEL_ALIGNMENT
) -> PageSize:
    """Find the smallest block whose rows take at least ``state_bytes``.

    Parameters
    ----------
    state_bytes : int
        Of a KDA layer, see :func:`kda_state_bytes`.
    row_bytes : int
        Of a token in an MLA layer: 576 values.
    alignment : int
        The block is a multiple of this many tokens.

    Examples
    --------
    >>> unify_page_size(814_080, 576 * 2).block_size, unify_page_size(814_080, 576).block_size
    (768, 1536)
    """
    for name, value in (
        ("state_bytes", state_bytes),
        ("row_bytes", row_bytes),
        ("alignment", alignment),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    block_size = alignment * -(-state_bytes // (alignment * row_bytes))
    return PageSize(block_size, block_size * row_bytes, state_bytes)


@dataclass(frozen=True)
class KVCacheGroups:
    """Layers of a model, in groups that have a block table each.

    Attributes
    ----------
    layers_per_group : int
        A block has a page in each of them.
    num_layers : mapping of str to int
        Layers of each kind.
    """

    layers_per_group: int
    num_layers: Mapping[str, int]

    @property
    def num_groups(self) -> dict[str, int]:
        """Groups of each kind."""
        size = self.layers_per_group
        return {kind: -(-count // size) for kind, count in self.num_layers.items()}

    @property
    def num_padding_layers(self) -> dict[str, int]:
        """Pages of a block that belong to no layer, in the groups of each kind."""
        return {
            kind: groups * self.layers_per_group - self.num_layers[kind]
            for kind, groups in self.num_groups.items()
        }

    @property
    def padding(self) -> dict[str, float]:
        """Padding layers as a share of the layers of their kind: what vLLM warns of."""
        return {kind: n / self.num_layers[kind] for kind, n in self.num_padding_layers.items()}

    def bytes_per_block(self, page_bytes: int) -> int:
        """Bytes of one block of the pool."""
        return page_bytes * self.layers_per_group


def group_layers(num_layers: Mapping[str, int]) -> KVCacheGroups:
    """Put layers in groups of one kind and equal size.

    The smallest kind sets the size, unless the largest is less than half as large again: then that
    one does, so that 24 and 25 layers do not become three groups.

    Parameters
    ----------
    num_layers : mapping of str to int
        Layers of each kind.

    Raises
    ------
    ValueError
        If a kind has none.

    Examples
    --------
    >>> k3 = group_layers({"mla": 24, "kda": 69})
    >>> k3.layers_per_group, k3.num_groups, k3.num_padding_layers
    (24, {'mla': 1, 'kda': 3}, {'mla': 0, 'kda': 3})
    >>> with_drafter = group_layers({"mla": 29, "kda": 69})  # five MLA layers more
    >>> f"{with_drafter.num_padding_layers['kda']} layers, {with_drafter.padding['kda']:.2%}"
    '18 layers, 26.09%'
    """
    counts = num_layers.values()
    if not counts or min(counts) < 1:
        raise ValueError(f"every kind needs at least one layer, got {dict(num_layers)}")
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    return KVCacheGroups(size, dict(num_layers))
