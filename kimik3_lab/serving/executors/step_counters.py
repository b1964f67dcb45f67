"""What steps have cost, counted where it happens.

Needs the standard library only. Lesson 10 reads it before and after a switch is turned.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["StepCounters"]


@dataclass
class StepCounters:
    """Sums since the executor was made. Whoever does a thing adds to its counter in that place.

    Attributes
    ----------
    forwards : int
        Passes over the target model.
    tokens : int
        Rows of those passes, drafts and placeholders included.
    launches : int
        Operators called by the mixer: a convolution, a recurrence or an attention over one class
        of rows in one layer.
    kda_state_writes : int
        States that a recurrence or a commit wrote, counted for each layer.
    kda_state_bytes_copied, conv_bytes_copied : int
        Bytes of KDA states and of convolution windows that were moved and not computed.
    gather_bytes : int
        Bytes copied to bring the rows of a class together, and to bring results back.
    checkpoint_exports : int
        States kept from inside a chunk, counted for each request.
    recovery_commits : int
        Requests whose accepted drafts were committed from records.
    block_copies : int
        Blocks copied because somebody shares them.
    drafter_forwards : int
        Passes over the drafter.

    Examples
    --------
    >>> counters = StepCounters()
    >>> before = counters.snapshot()
    >>> counters.forwards += 2
    >>> (counters - before).forwards, before.forwards
    (2, 0)
    """

    forwards: int = 0
    tokens: int = 0
    launches: int = 0
    kda_state_writes: int = 0
    kda_state_bytes_copied: int = 0
    conv_bytes_copied: int = 0
    gather_bytes: int = 0
    checkpoint_exports: int = 0
    recovery_commits: int = 0
    block_copies: int = 0
    drafter_forwards: int = 0

    def snapshot(self) -> StepCounters:
        """Copy that does not count on."""
        return replace(self)

    def __sub__(self, earlier: StepCounters) -> StepCounters:
        """Return what has been counted since ``earlier``."""
        differences = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)
        }
        return StepCounters(**differences)
