"""What one running sequence keeps between steps, as bytes against its length.

Needs the standard library only. Lesson 01 derives it; the placement of a model on GPUs and the
bytes of a decode step build on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimik3_lab.config import K3Config

__all__ = ["SequenceMemory", "sequence_memory"]


@dataclass(frozen=True)
class SequenceMemory:
    """What one sequence keeps between steps, in bytes, all layers together, not sharded.

    The KDA layers keep a state whose size does not depend on the context: a recurrent matrix a head
    and the last few inputs of the short convolution. The MLA layers keep a row a token.

    Examples
    --------
    >>> memory = sequence_memory(K3Config.released())
    >>> memory.state_bytes, memory.mla_bytes_per_token
    (449372160, 27648)
    >>> memory.state_in_tokens, memory.all_mla_break_even
    (16254, 5654)
    """

    kda_recurrent_bytes: int
    kda_conv_bytes: int
    mla_bytes_per_token: int
    #: The same rows if every layer were MLA: the model that K3 is compared with.
    all_mla_bytes_per_token: int

    @property
    def state_bytes(self) -> int:
        """Size of the KDA state, at any context length."""
        return self.kda_recurrent_bytes + self.kda_conv_bytes

    @property
    def state_in_tokens(self) -> int | None:
        """First context at which the model's own MLA rows weigh as much as its KDA state."""
        return _first_context(self.state_bytes, self.mla_bytes_per_token)

    @property
    def all_mla_break_even(self) -> int | None:
        """First context at which the hybrid needs no more than a model of MLA layers only."""
        saved = self.all_mla_bytes_per_token - self.mla_bytes_per_token
        return _first_context(self.state_bytes, saved)

    def bytes_at(self, tokens: int) -> int:
        """Memory of a sequence of ``tokens`` tokens.

        Raises
        ------
        ValueError
            If ``tokens`` is negative.
        """
        return self.state_bytes + self._checked(tokens) * self.mla_bytes_per_token

    def all_mla_bytes_at(self, tokens: int) -> int:
        """Memory of the same sequence if every layer were MLA."""
        return self._checked(tokens) * self.all_mla_bytes_per_token

    @staticmethod
    def _checked(tokens: int) -> int:
        if tokens < 0:
            raise ValueError(f"a context has 0 or more tokens, got {tokens}")
        return tokens


def _first_context(state: int, per_token: int) -> int | None:
    """First token count whose rows reach ``state`` bytes; None if a token adds no byte."""
    if state == 0:
        return 0
    return -(-state // per_token) if per_token else None


def sequence_memory(
    config: K3Config, *, recurrent_itemsize: int = 4, cache_itemsize: int = 2
) -> SequenceMemory:
    """Work out what one sequence keeps between steps.

    Parameters
    ----------
    config
        Any member of the family.
    recurrent_itemsize
        Bytes of an element of the recurrent state. vLLM keeps it in float32.
    cache_itemsize
        Bytes of an element of the convolution window and of the MLA rows: 2 for bfloat16.

    Examples
    --------
    >>> sequence_memory(K3Config.released()).kda_recurrent_bytes
    434110464
    """
    kda = config.linear_attn_config
    layers = len(kda.kda_layers)
    recurrent = layers * kda.num_heads * kda.head_dim * kda.head_dim * recurrent_itemsize
    # q, k and v each keep the inputs that the next token's convolution still needs.
    window = kda.short_conv_kernel_size - 1
    conv = layers * 3 * kda.projection_size * window * cache_itemsize
    row = config.mla_cache_dim * cache_itemsize
    return SequenceMemory(
        kda_recurrent_bytes=recurrent,
        kda_conv_bytes=conv,
        mla_bytes_per_token=len(config.mla_layer_ids) * row,
        all_mla_bytes_per_token=config.num_hidden_layers * row,
    )
