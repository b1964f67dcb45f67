"""Checks that the KDA operators share: which slots of a cache a call's requests read and write.

Needs PyTorch. What tensors hold is looked at on the CPU only.
"""

from __future__ import annotations

import torch

from k3_kernels._numbers import check_int

__all__ = [
    "check_null_slot",
    "check_owners",
    "check_sequences",
    "check_slots",
    "check_starts",
    "looks_at",
]


def looks_at(tensor: torch.Tensor) -> bool:
    """Whether checks read the values of a tensor: on a GPU that would wait for it."""
    return tensor.device.type == "cpu"


def check_null_slot(operator: str, null_slot: int) -> None:
    """Refuse a null slot below -1: what is above it counts as a slot, and none is negative."""
    check_int(operator, "null_slot", null_slot, at_least=-1)


def check_slots(
    operator: str,
    name: str,
    numbers: torch.Tensor,
    num_slots: int | None,
    null_slot: int,
    *,
    like: torch.Tensor,
    rows: int | None = None,
    distinct: bool = True,
) -> torch.Tensor:
    """Check int32 numbers of requests and return them as ``[B, S]``.

    With ``num_slots`` they are slots: on the CPU, where looking at them does not stop a GPU, each
    must exist and, if they have to be ``distinct``, occur once. Those that only some requests use
    are left to :func:`check_owners`.
    """
    where = f"k3_kernels.{operator}: {name}"
    if not isinstance(numbers, torch.Tensor):
        raise TypeError(f"{where} must be a torch.Tensor, got {type(numbers).__name__}")
    if numbers.dtype != torch.int32:
        raise TypeError(f"{where} is {numbers.dtype}, expected torch.int32: convert with .int()")
    if numbers.device != like.device:
        raise ValueError(f"{where} is on {numbers.device}, expected {like.device}")
    if rows is not None and tuple(numbers.shape) != (rows,):
        raise ValueError(f"{where} has shape {list(numbers.shape)}, expected [{rows}]")
    if numbers.ndim == 1:
        if numbers.numel() > 1 and num_slots is None and numbers.stride(0) != 1:
            raise ValueError(f"{where} has stride {numbers.stride(0)}, expected 1")
        numbers = numbers[:, None]
    if numbers.ndim != 2 or numbers.shape[1] < 1:
        raise ValueError(f"{where} has shape {list(numbers.shape)}, expected [B] or [B, S]")
    if num_slots is not None and looks_at(numbers):
        used = numbers[numbers > null_slot]
        if used.numel() and int(used.max()) >= num_slots:
            raise ValueError(
                f"{where} names slot {int(used.max())}, but there are only {num_slots}"
            )
        if distinct and used.unique().numel() != used.numel():
            counts = used.unique(return_counts=True)
            twice = int(counts[0][counts[1] > 1][0])
            raise ValueError(
                f"{where} names slot {twice} more than once: requests cannot share a state"
            )
    return numbers


def check_owners(
    operator: str,
    null_slot: int,
    starts: torch.Tensor,
    counts: torch.Tensor,
    *,
    ends: torch.Tensor | None = None,
    between: tuple[str, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Refuse slots that several requests of a call use, and two states for one slot, on the CPU.

    Programs of one launch run in any order, so a slot that one request writes must not be read or
    written by another. A request may keep the state at its boundary where it started from, but not
    in the slot that takes its end: that can hold one of the two.

    Parameters
    ----------
    operator, null_slot
        As elsewhere.
    starts, counts
        ``[B]``: the slot of each request, and its tokens; none of them and nothing is written.
    ends
        ``[B]``: where the last state goes; None: to ``starts``.
    between
        A name for messages, ``[B]`` slots, and ``[B]`` numbers of tokens: where 1 to all of the
        request's, the state after so many goes to that slot too.
    """
    if not looks_at(starts):
        return
    firsts = starts.tolist()
    owners = {slot: (b, "state_slots") for b, slot in enumerate(firsts) if slot > null_slot}
    lasts = firsts if ends is None else ends.tolist()
    moving = {
        b: count
        for b, (first, last, count) in enumerate(zip(firsts, lasts, counts.tolist(), strict=True))
        if first > null_slot and last > null_slot and count > 0
    }
    name = "state_slots" if ends is None else "final_slots"
    written = [(b, name, lasts[b], False) for b in moving]
    if between is not None:
        name, slots, places = between[0], between[1].tolist(), between[2].tolist()
        written += [
            (b, name, slots[b], slots[b] == lasts[b])
            for b, count in moving.items()
            if 1 <= places[b] <= count and slots[b] > null_slot
        ]
    for b, name, slot, twice in written:
        owner, where = owners.setdefault(slot, (b, name))
        if owner != b:
            raise ValueError(
                f"k3_kernels.{operator}: {name} names slot {slot} for request {b}, but request "
                f"{owner} has it in {where}: requests cannot share a slot"
            )
        if twice:
            raise ValueError(
                f"k3_kernels.{operator}: {name} names slot {slot} for request {b}, whose last "
                "state goes there: it can hold one of the two, name another slot"
            )


def check_starts(
    operator: str, cu_seqlens: torch.Tensor, num_tokens: int, batch: int, *, like: torch.Tensor
) -> None:
    """Check int32 ``[B + 1]`` that says where the tokens of B sequences begin.

    On the CPU, where looking at them does not stop a GPU, they must ascend and stay within N: a
    kernel follows them wherever they lead.
    """
    check_slots(operator, "cu_seqlens", cu_seqlens, None, -1, like=like, rows=batch + 1)
    if looks_at(cu_seqlens):
        starts = cu_seqlens.tolist()
        if starts[0] < 0 or starts[-1] > num_tokens or starts != sorted(starts):
            raise ValueError(
                f"k3_kernels.{operator}: cu_seqlens is {starts}, expected numbers that ascend "
                f"from 0 or more to at most {num_tokens}, the tokens there are"
            )


def check_sequences(
    operator: str,
    state_slots: torch.Tensor,
    num_slots: int,
    null_slot: int,
    *,
    cu_seqlens: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    checkpoint_at: torch.Tensor | None,
    checkpoint_slots: torch.Tensor | None,
    like: torch.Tensor,
) -> tuple[int, torch.Tensor | None]:
    """Check what says where sequences are, start and leave states; ``like`` has a row per token.

    Returns their number and ``has_initial_state`` as a kernel can read it.
    """
    where = f"k3_kernels.{operator}:"

    def numbers(name: str, given: torch.Tensor, rows: int, slots: int | None = None) -> None:
        check_slots(operator, name, given, None, null_slot, like=like, rows=rows)
        if slots is not None:
            check_slots(operator, name, given, slots, null_slot, like=like, distinct=False)

    check_null_slot(operator, null_slot)
    slots = check_slots(operator, "state_slots", state_slots, num_slots, null_slot, like=like)
    batch = slots.shape[0]
    numbers("state_slots", state_slots, batch)
    if (checkpoint_at is None) != (checkpoint_slots is None):
        raise ValueError(f"{where} checkpoint_at and checkpoint_slots go together")
    if checkpoint_at is not None and checkpoint_slots is not None:
        numbers("checkpoint_at", checkpoint_at, batch)
        numbers("checkpoint_slots", checkpoint_slots, batch, num_slots)
    if cu_seqlens is not None:
        check_starts(operator, cu_seqlens, like.shape[0], batch, like=like)
    elif batch != 1:
        raise ValueError(f"{where} {batch} sequences need cu_seqlens to tell them apart")
    if checkpoint_at is not None and checkpoint_slots is not None and looks_at(state_slots):
        ends = torch.tensor([0, like.shape[0]]) if cu_seqlens is None else cu_seqlens
        check_owners(
            operator, null_slot, state_slots, ends.diff(),
            between=("checkpoint_slots", checkpoint_slots, checkpoint_at),
        )  # fmt: skip
    if has_initial_state is not None:
        if not isinstance(has_initial_state, torch.Tensor):
            raise TypeError(
                f"{where} has_initial_state must be a torch.Tensor, "
                f"got {type(has_initial_state).__name__}"
            )
        if has_initial_state.dtype == torch.bool:
            has_initial_state = has_initial_state.view(torch.int8)
        if has_initial_state.is_floating_point() or has_initial_state.is_complex():
            raise TypeError(
                f"{where} has_initial_state is {has_initial_state.dtype}, expected bool or int32"
            )
        if tuple(has_initial_state.shape) != (batch,) or has_initial_state.device != like.device:
            raise ValueError(
                f"{where} has_initial_state has shape {list(has_initial_state.shape)} on "
                f"{has_initial_state.device}, expected [{batch}] on {like.device}"
            )
        if batch > 1 and has_initial_state.stride(0) != 1:
            raise ValueError(
                f"{where} has_initial_state has stride {has_initial_state.stride(0)}, expected 1: "
                "call .contiguous() first"
            )
    return batch, has_initial_state
