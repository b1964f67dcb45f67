"""What a step needs of the one before while the host knows neither: tokens, counts and places.

Needs PyTorch; Triton when it runs. Lesson 10 runs it behind ``async_scheduling``. vLLM's model
runner has kernels for the same: ``combine_sampled_and_draft_tokens``, ``prepare_pos_seq_lens`` and
``post_update`` in ``vllm/v1/worker/gpu/input_batch.py``.

A step may be sent to the device before the last one has answered. Then its first token is the one
that the last step sampled, its drafts are those that were made of it, and it begins behind as many
of the last drafts as were right. All of that lies in tables with a row for each seat.
:func:`fill_in_seats` reads them before the forward pass, :func:`settle_seats` verifies the drafts
behind it and writes them again. In small operators of PyTorch this is some fifty launches a step,
and the processor spends more time on them than on all else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3_kernels._compat import (
    check_integers,
    check_ndim,
    check_runs_here,
    load_kernels,
    next_power_of_2,
    on_device,
)

__all__ = ["Seats", "fill_in_seats", "settle_seats"]


class Seats(NamedTuple):
    """Tables with a row for each of S seats, and one more that belongs to nobody.

    All are contiguous, int32 or int64, on one device.

    Attributes
    ----------
    num_computed : Tensor
        ``[S + 1]``: tokens in the cache, without rejected drafts.
    num_accepted : Tensor
        ``[S + 1]``: behind which row of the last step the recurrent state is to be taken, from 1.
    last_token : Tensor
        ``[S + 1]``: sampled and not computed yet.
    drafts : Tensor
        ``[S + 1, K]``: what was drafted behind it, -1 for nothing.
    """

    num_computed: torch.Tensor
    num_accepted: torch.Tensor
    last_token: torch.Tensor
    drafts: torch.Tensor


def fill_in_seats(
    seats: Seats,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """Write into the rows of a step what the seats know.

    Parameters
    ----------
    seats
        Read.
    slots
        ``[n]``: a seat for each request, 0 to S.
    token_ids
        ``[n * T]``, T rows of each request. Where it is negative, the first row becomes the
        seat's last token and row j its draft j - 1; 0 if there is none.
    positions
        ``[n * T]``, written: where each row stands in its sequence.
    starts, num_accepted
        ``[n]``, written: the first position, and the seat's ``num_accepted``.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. What the tensors hold is not looked at.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> def numbers(*values): return torch.tensor(values, device=device)
    >>> seats = Seats(numbers(7, 0), numbers(2, 1), numbers(5, 0), numbers([8, -1], [-1, -1]))
    >>> tokens, places = numbers(-1, -1, -1), numbers(0, 0, 0)
    >>> fill_in_seats(seats, numbers(0), tokens, places, numbers(0), numbers(0))
    >>> tokens.tolist(), places.tolist()
    ([5, 8, 0], [7, 8, 9])
    """
    num_drafts = _check_seats("fill_in_seats", seats, slots)
    number, where = len(slots), "fill_in_seats"
    check_ndim(where, "token_ids", token_ids, "[n * T]")
    num_tokens, rest = divmod(len(token_ids), number) if number else (1, len(token_ids))
    if rest or not 1 <= num_tokens <= num_drafts + 1:
        raise ValueError(
            f"k3_kernels.{where}: {len(token_ids)} token_ids for {number} requests with up to "
            f"{num_drafts} drafts, expected the same number of rows, 1 to {num_drafts + 1}, of each"
        )
    rows = (number * num_tokens,)
    for name, tensor, shape in (
        ("token_ids", token_ids, rows),
        ("positions", positions, rows),
        ("starts", starts, (number,)),
        ("num_accepted", num_accepted, (number,)),
    ):
        check_integers(where, name, tensor, shape, like=slots)
    if not number:
        return
    kernels = load_kernels(where, "seat_tables")
    check_runs_here(where, kernels.fill_in_kernel, slots)
    with on_device(slots):
        kernels.fill_in_kernel[(number,)](
            token_ids, positions, starts, num_accepted, slots, *seats, num_tokens, num_drafts,
            BLOCK=next_power_of_2(num_tokens), num_warps=1,
        )  # fmt: skip


def settle_seats(
    seats: Seats,
    slots: torch.Tensor,
    best: torch.Tensor,
    firsts: torch.Tensor,
    num_drafts: torch.Tensor,
    counts: torch.Tensor,
    most: int,
    *,
    keeps_states: bool = False,
    enabled: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep of each seat's drafts what the model would have said, and move the seats on.

    Parameters
    ----------
    seats
        ``num_computed`` grows by the rows that are kept; ``last_token`` is the last new token, and
        ``num_accepted`` the number of kept rows (with ``keeps_states``, of a request that verified
        drafts) or 1. The row that belongs to nobody stays as it is.
    slots
        ``[n]``: a seat for each request, 0 to S; only S, which is nobody's, may come twice.
    best
        ``[M]``: the token chosen in each row of the logits, -1 if there is none.
    firsts
        ``[n]``: where in ``best`` the rows of the request begin; -1 if nothing is sampled.
    num_drafts
        ``[n]``: drafts that it verifies, up to ``most``: they are the first of its seat's. Its
        rows in ``best`` are one more.
    counts
        ``[n]``: rows of the step; all of them are kept where there are no drafts.
    most
        As many new tokens and one more fit the result; at most K.
    keeps_states
        See above.
    enabled
        ``[1]``; with 0 in it the seats stay as they are. None stands for 1.

    Returns
    -------
    Tensor
        int64 ``[n, most + 3]``: new tokens, -1 behind the last of them; how many there are, 0 where
        nothing is sampled; and 1 if a row that matters had no token to choose, 0 otherwise. The
        rows that matter are those up to behind the last draft that is not -1.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message names it. What the tensors hold is not looked at.
    ImportError, RuntimeError
        If Triton is missing or cannot run here.

    Examples
    --------
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> def numbers(*values): return torch.tensor(values, device=device)
    >>> seats = Seats(numbers(7, 0), numbers(1, 1), numbers(5, 0), numbers([8, 3], [-1, -1]))
    >>> best, first, drafts, rows = numbers(8, 4, 9), numbers(0), numbers(2), numbers(3)
    >>> settle_seats(seats, numbers(0), best, first, drafts, rows, 2).tolist()
    [[8, 4, -1, 2, 0]]
    >>> seats.num_computed.tolist(), seats.last_token.tolist()
    ([9, 0], [4, 0])
    """
    where = "settle_seats"
    width = _check_seats(where, seats, slots)
    number = len(slots)
    if not isinstance(most, int) or not 0 <= most <= width:
        raise ValueError(f"k3_kernels.{where}: most must be from 0 to K={width}, got {most}")
    check_ndim(where, "best", best, "[M]")
    for name, tensor, shape in (
        ("best", best, (len(best),)),
        ("firsts", firsts, (number,)),
        ("num_drafts", num_drafts, (number,)),
        ("counts", counts, (number,)),
    ):
        check_integers(where, name, tensor, shape, like=slots)
    if enabled is not None:
        check_integers(where, "enabled", enabled, (1,), like=slots)
    out = torch.empty(number, most + 3, dtype=torch.int64, device=slots.device)
    if not number:
        return out
    kernels = load_kernels(where, "seat_tables")
    check_runs_here(where, kernels.settle_kernel, slots)
    with on_device(slots):
        kernels.settle_kernel[(number,)](
            out, *seats, best, slots, firsts, num_drafts, counts,
            slots if enabled is None else enabled, len(seats.num_computed) - 1, width, most,
            KEEPS_STATES=keeps_states, HAS_ENABLED=enabled is not None,
            BLOCK=next_power_of_2(most + 1), num_warps=1,
        )  # fmt: skip
    return out


def _check_seats(operator: str, seats: Seats, slots: torch.Tensor) -> int:
    """Refuse tables that do not belong together; return K."""
    check_ndim(operator, "slots", slots, "[n]")
    check_integers(operator, "slots", slots, (len(slots),), like=slots)
    check_ndim(operator, "drafts", seats.drafts, "[S + 1, K]")
    rows, width = seats.drafts.shape
    if not rows:
        raise ValueError(
            f"k3_kernels.{operator}: drafts has no row, expected one more than there are seats"
        )
    check_integers(operator, "drafts", seats.drafts, (rows, width), like=slots)
    for name in ("num_computed", "num_accepted", "last_token"):
        check_integers(operator, name, getattr(seats, name), (rows,), like=slots)
    return width
