"""What a server can be told: one frozen record shared by ``k3lab serve`` and the background start.

Needs the standard library only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

__all__ = [
    "API_KEY_VARIABLE",
    "CHOICES",
    "MAX_REQUEST_BYTES",
    "ServeOptions",
    "ServerStartError",
]

#: Values of the options that have a choice.
CHOICES: dict[str, tuple[str, ...]] = {
    "batching": ("continuous", "static"),
    "policy": ("fcfs", "priority"),
    "token_budget": ("static", "adaptive", "lookahead_cap"),
    "prefill_checkpoints": ("split", "internal"),
    "speculative_states": ("slots", "records"),
    "draft_sample_method": ("greedy", "probabilistic"),
    "rejection_sample_method": ("standard", "block", "coupled"),
    "backend": ("reference", "triton"),
    "mixed_batch": ("gather", "zero_copy"),
    "dtype": ("float32", "float64", "bfloat16"),
    "log_level": ("debug", "info", "warning", "error"),
}
#: Where an API key is read from: other users of a machine can read a command line, not this.
API_KEY_VARIABLE = "K3LAB_API_KEY"
#: Longest body of a request unless told otherwise.
MAX_REQUEST_BYTES = 4 * 2**20

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
    api_key
        Asked for by everything under ``/v1``: printable ASCII. Never printed, and never on a
        command line.
    max_num_queued_reqs
        Most requests in flight, waiting and running together; more are answered 429. None for no
        limit.
    max_request_bytes
        Longest body of a request; a longer one is answered 413.
    preset
        Rung of :data:`~kimik3_lab.serving.presets.LADDER` that unset switches are taken from.
    batching
        ``"continuous"`` lets a request join at any step, ``"static"`` waits for a whole batch to
        end before it starts the next.
    policy, token_budget, long_prefill_token_threshold, async_scheduling
        See :class:`~kimik3_lab.serving.config.SchedulerConfig`.
    max_num_seqs
        Sequences that run at once.
    max_num_batched_tokens
        Tokens that one step may compute, all sequences together; 512 without a preset.
    max_model_len
        Longest prompt and answer together; by default the model's own limit, at most 2048 and at
        most what ``num_blocks`` hold.
    num_blocks, block_size
        Blocks of the cache and tokens in a block. By default the cache holds ``max_num_seqs``
        sequences of ``max_model_len`` tokens, so nothing is ever preempted. It must hold one.
    enable_prefix_caching, prefix_match_unit, prefill_checkpoints, speculative_states
        See :class:`~kimik3_lab.serving.config.CacheConfig`.
    prefix_cache_retention_interval
        Its ``retention_interval``.
    num_speculative_tokens
        Tokens of a draft; 0 turns speculation off. Without a preset it is off.
    drafter
        Folder of the drafter; ``drafter`` in the model's folder by default.
    draft_sample_method, rejection_sample_method, backend
        See :class:`~kimik3_lab.serving.executors.torch_executor.TorchExecutor`. The defaults are
        vLLM's. With drafts that are drawn (``"probabilistic"``) the rules ``"standard"`` and
        ``"block"`` keep the *distribution* of a request's text, and only ``"coupled"``, which is
        the lab's own, keeps the text of a seed: with the others it changes with the drafts that a
        step has room for, and so with the load and with a preemption.
    mixed_batch, deferred_finalize, cuda_graphs
        See :class:`~kimik3_lab.serving.executors.execution.ExecutionConfig`.
    dtype
        Number format of weights and activations.
    device
        Where the model computes, as PyTorch names it.
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

    #: Budget of a step without a preset: a prompt holds up the others' next token only shortly.
    DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 512

    model: str | Path
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_num_queued_reqs: int | None = 1024
    max_request_bytes: int = MAX_REQUEST_BYTES
    preset: str | None = None
    batching: str = "continuous"
    policy: str | None = None
    token_budget: str | None = None
    long_prefill_token_threshold: int | None = None
    async_scheduling: bool | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_blocks: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool | None = None
    prefix_match_unit: int | None = None
    prefill_checkpoints: str | None = None
    prefix_cache_retention_interval: int | None = None
    speculative_states: str | None = None
    num_speculative_tokens: int | None = None
    drafter: str | Path | None = None
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    backend: str = "reference"
    mixed_batch: str | None = None
    deferred_finalize: bool | None = None
    cuda_graphs: bool = False
    dtype: str = "float32"
    device: str | None = None
    threads: int | None = None
    log_level: str = "info"
    shutdown_timeout: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must lie between 0 and 65535, got {self.port}")
        for least, *names in (
            (1, "max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks",
             "block_size", "threads", "max_num_queued_reqs", "max_request_bytes",
             "prefix_match_unit"),
            (0, "num_speculative_tokens", "long_prefill_token_threshold",
             "prefix_cache_retention_interval"),
        ):  # fmt: skip
            for name in names:
                value = getattr(self, str(name))
                if value is not None and value < least:
                    raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("api_key must not be empty; leave it out to ask for none")
        if self.api_key is not None and not _can_be_sent(self.api_key):
            raise ValueError(
                "api_key must be printable ASCII without a blank at either end: clients send it in "
                "a header, and could not send this one"
            )
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

    def command_line(self) -> list[str]:
        """Return the options of ``k3lab serve`` that differ from their defaults, but for the key.

        Whoever starts the command hands the key over in :data:`API_KEY_VARIABLE`.
        """
        words: list[str] = []
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if value == entry.default or entry.name == "api_key":
                continue
            option = entry.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            elif value is None:
                words += [f"--{option}", "0"]  # only max_num_queued_reqs, where 0 is no limit
            else:
                words += [f"--{option}", str(value)]
        return words


def _can_be_sent(api_key: str) -> bool:
    return api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()
