"""What a server can be told: one frozen record shared by ``k3lab serve`` and the background start.

Needs the standard library only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BATCHING", "DTYPES", "LOG_LEVELS", "ServeOptions", "ServerStartError"]

BATCHING = ("continuous", "static")
DTYPES = ("float32", "float64", "bfloat16")
LOG_LEVELS = ("debug", "info", "warning", "error")

#: Longest context that is served unless asked for: the cache holds this much for every sequence.
_DEFAULT_MAX_MODEL_LEN = 2048


class ServerStartError(RuntimeError):
    """A server that cannot start; the message says why and what to change."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Settings of one server. The names are those of ``vllm serve`` where it has the setting.

    Parameters
    ----------
    model
        Folder of the model.
    host, port
        Where to listen. Port 0 takes any free one.
    served_model_name
        Name that requests use; the name of the folder by default.
    batching
        ``"continuous"`` lets a request join at any step, ``"static"`` waits for a whole batch to
        end before it starts the next.
    max_num_seqs
        Sequences that run at once.
    max_num_batched_tokens
        Tokens that one step may compute, all sequences together.
    max_model_len
        Longest prompt and answer together; by default the model's own limit, at most 2048.
    num_blocks, block_size
        Blocks of the cache and tokens in a block. By default the cache holds ``max_num_seqs``
        sequences of ``max_model_len`` tokens, so nothing is ever preempted.
    dtype
        Number format of weights and activations.
    threads
        CPU threads of the model; PyTorch's own choice by default.
    log_level
        Least severe messages that are printed.
    shutdown_timeout
        Seconds that running requests get to finish after a signal to stop; then they are aborted.

    Raises
    ------
    ValueError
        If a setting is out of its range.

    Examples
    --------
    >>> ServeOptions(model="data/tiny-k3", port=0).command_line()
    ['--model', 'data/tiny-k3', '--port', '0']
    """

    model: str | Path
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    batching: str = "continuous"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    num_blocks: int | None = None
    block_size: int = 16
    dtype: str = "float32"
    threads: int | None = None
    log_level: str = "info"
    shutdown_timeout: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("batching", BATCHING),
            ("dtype", DTYPES),
            ("log_level", LOG_LEVELS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must lie between 0 and 65535, got {self.port}")
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "num_blocks",
            "block_size",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ValueError(f"shutdown_timeout must be 0 or more, got {self.shutdown_timeout}")

    @property
    def model_name(self) -> str:
        """Name that requests use."""
        return self.served_model_name or Path(self.model).resolve().name

    def context_length(self, max_position_embeddings: int) -> int:
        """Longest prompt and answer together, for a model with this limit of its own.

        Raises
        ------
        ValueError
            If ``max_model_len`` asks for more than the model has.
        """
        if self.max_model_len is None:
            return min(max_position_embeddings, _DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > max_position_embeddings:
            raise ValueError(
                f"max_model_len={self.max_model_len} is more than the model's "
                f"max_position_embeddings={max_position_embeddings}"
            )
        return self.max_model_len

    def cache_blocks(self, context_length: int) -> int:
        """Blocks of the cache: as asked, or room for every sequence at its longest."""
        if self.num_blocks is not None:
            return self.num_blocks
        blocks_per_sequence = -(-context_length // self.block_size)
        return self.max_num_seqs * blocks_per_sequence + 1  # block 0 is never handed out

    def command_line(self) -> list[str]:
        """Return the options of ``k3lab serve`` that differ from their defaults."""
        words: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words += ["--" + field.name.replace("_", "-"), str(value)]
        return words
