"""Triton code of :mod:`k3_kernels.seat_tables`: what a step needs of the one before, by seat.

Needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fill_in_kernel", "settle_kernel"]


@triton.jit
def fill_in_kernel(
    token_ids_ptr,  # [n * num_tokens], changed in place where negative
    positions_ptr,  # [n * num_tokens]
    starts_ptr,  # [n]
    accepted_ptr,  # [n]
    slots_ptr,  # [n]
    num_computed_ptr,  # [S + 1]
    num_accepted_ptr,  # [S + 1]
    last_token_ptr,  # [S + 1]
    drafts_ptr,  # [S + 1, num_drafts]
    num_tokens,
    num_drafts,
    BLOCK: tl.constexpr,  # at least num_tokens
):
    """One program fills in the rows of one request."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    start = tl.load(num_computed_ptr + slot).to(tl.int64)
    tl.store(starts_ptr + request, start)
    tl.store(accepted_ptr + request, tl.load(num_accepted_ptr + slot))
    place = tl.arange(0, BLOCK)
    inside = place < num_tokens
    row = request * num_tokens + place
    tl.store(positions_ptr + row, start + place, mask=inside)
    planned = tl.load(token_ids_ptr + row, mask=inside, other=0).to(tl.int64)
    draft = drafts_ptr + slot * num_drafts + place - 1
    drafted = tl.load(draft, mask=inside & (place > 0), other=-1).to(tl.int64)
    own = tl.where(place == 0, tl.load(last_token_ptr + slot).to(tl.int64), drafted)
    token = tl.where(planned < 0, own, planned)
    tl.store(token_ids_ptr + row, tl.maximum(token, 0), mask=inside)


@triton.jit
def settle_kernel(
    out_ptr,  # [n, most + 3]
    num_computed_ptr,  # [S + 1], changed
    num_accepted_ptr,  # [S + 1], changed
    last_token_ptr,  # [S + 1], changed
    drafts_ptr,  # [S + 1, num_drafts]
    best_ptr,  # [M]
    slots_ptr,  # [n]
    firsts_ptr,  # [n]
    verified_ptr,  # [n]
    counts_ptr,  # [n]
    enabled_ptr,  # [1], read if HAS_ENABLED
    num_slots,  # S: the row of that number belongs to nobody
    num_drafts,
    most,
    KEEPS_STATES: tl.constexpr,  # the state behind each row is kept: say which is meant
    HAS_ENABLED: tl.constexpr,
    BLOCK: tl.constexpr,  # at least most + 1
):
    """One program verifies the drafts of one request and moves it on."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    first = tl.load(firsts_ptr + request).to(tl.int64)
    verified = tl.load(verified_ptr + request).to(tl.int32)
    is_sampled = first >= 0
    place = tl.arange(0, BLOCK)

    last_row = tl.where(is_sampled, verified, -1)
    choice = tl.load(best_ptr + first + place, mask=place <= last_row, other=-1).to(tl.int64)
    drafted = tl.load(drafts_ptr + slot * num_drafts + place, mask=place < verified, other=-1)
    drafted = drafted.to(tl.int64)
    # Drafts that are there, and those of them that are right, each up to the first that is not.
    num_known = tl.min(tl.where(drafted >= 0, BLOCK, place), 0)
    num_kept = tl.min(tl.where((drafted >= 0) & (drafted == choice), BLOCK, place), 0)
    broken = is_sampled & (tl.max(((choice < 0) & (place <= num_known)).to(tl.int32), 0) > 0)
    row = out_ptr + request * (most + 3)
    tl.store(row + place, tl.where(place <= num_kept, choice, -1), mask=place <= most)
    num_new = tl.where(is_sampled, num_kept + 1, 0)
    tl.store(row + most + 1, num_new)
    tl.store(row + most + 2, broken.to(tl.int64))

    moves_on = slot < num_slots
    if HAS_ENABLED:
        moves_on = moves_on & (tl.load(enabled_ptr) != 0)
    planned = tl.load(counts_ptr + request).to(tl.int64)
    num_rows = tl.where(verified > 0, num_new.to(tl.int64), planned)
    before = tl.load(num_computed_ptr + slot).to(tl.int64)
    tl.store(num_computed_ptr + slot, before + num_rows, mask=moves_on)
    state = 1
    if KEEPS_STATES:
        state = tl.where(verified > 0, num_new, 1)
    tl.store(num_accepted_ptr + slot, state, mask=moves_on)
    last = tl.sum(tl.where(place == num_kept, choice, 0), 0)
    tl.store(last_token_ptr + slot, tl.maximum(last, 0), mask=moves_on & is_sampled)
