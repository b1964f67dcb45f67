"""An executor with a memory: it notices every row and state that is not what it should be.

A row of an attention page, and a KDA state, is a digest of *all* tokens up to its place. So whoever
reads a block that was not written yet, was overwritten, belongs to other tokens or to another
place reads a wrong digest, and the test says which. What it writes where follows vLLM's worker:
pages by place, the running state in the column of the last token, one scratch state for each draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kimik3_lab.serving import CacheConfig, ModelRunnerOutput, Scheduler, SchedulerOutput
from kimik3_lab.serving.kv_cache_manager import cdiv

__all__ = ["EOS", "VOCAB", "Broken", "Copy", "MemoryExecutor", "extend", "next_token", "start"]

VOCAB = 23
EOS = 1
_PRIME = (1 << 61) - 1


class Broken(AssertionError):
    """An invariant does not hold."""


def start(salt: str | None) -> int:
    """Digest of no tokens; a salt makes all that follows another's."""
    return 7 if salt is None else 7 + sum(map(ord, salt))


def extend(digest: int, token: int) -> int:
    """Digest of one token more."""
    return (digest * 1_000_003 + token + 1) % _PRIME


def next_token(digest: int) -> int:
    """A "model" in which every token, and its place, decides the next one."""
    return (digest >> 7) % VOCAB


@dataclass
class Copy:
    """What the executor knows of a request: tokens, digests of their prefixes, block tables."""

    tokens: list[int]
    digests: list[int]  # digests[i] is that of tokens[:i]
    tables: list[list[int]]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)  # for each state group, where its state is
    has_seat: bool = True
    lost: int = 0  # times that it was preempted

    @classmethod
    def of(cls, tokens: list[int], salt: str | None, tables: list[list[int]]) -> Copy:
        copy = cls([], [start(salt)], tables)
        copy.append(tokens)
        return copy

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.digests.append(extend(self.digests[-1], token))


class MemoryExecutor:
    """Executes plans, and raises :class:`Broken` when what it reads is not what it should be.

    ``blocks[id]`` is what a block holds: for pages a dict from offset to digest, for states a pair
    (digest, tokens read).
    """

    def __init__(self, scheduler: Scheduler, rng: Random) -> None:
        self.scheduler, self.rng = scheduler, rng
        config: CacheConfig = scheduler.cache_config
        self.config, self.num_states = config, config.num_kda_groups
        self.num_pages = config.num_attention_groups
        self.page_size = config.block_size * config.dcp_world_size
        self.align = config.mamba_cache_mode == "align"
        drafts = scheduler.scheduler_config.num_speculative_tokens
        self.scratch = drafts if config.speculative_states == "slots" else 0
        #: Whether the drafter's row for a token depends on the token behind it. Only a hash that
        #: covers that token proves the row: vLLM's older rule, which drops a block, takes a
        #: duplicate of a block that was followed by another token.
        self.reads_ahead = scheduler.scheduler_config.num_hash_lookahead_tokens > 0
        self.asynchronous = scheduler.scheduler_config.async_scheduling
        self.lookahead = scheduler.scheduler_config.num_lookahead_tokens
        self.max_model_len = scheduler.scheduler_config.max_model_len
        self.notes: dict[int, list[dict[str, tuple[int, int]]]] = {}
        self.blocks: dict[int, object] = {}
        self.drafter: dict[int, dict[int, int]] = {}
        self.copies: dict[str, Copy] = {}
        self.hits = 0

    # -- what a plan says --------------------------------------------------------------------

    def note(self, plan: SchedulerOutput) -> None:
        """Look at a plan as soon as it is made: what its kernels export, who holds what."""
        manager = self.scheduler.kv_cache_manager
        states = manager.coordinator.states
        self.notes[id(plan)] = [dict(getattr(s, "_checkpoints", {})) for s in states]
        if self.asynchronous:
            return
        blocks = manager.block_pool.blocks
        for request in plan.scheduled:
            copy = self.copies.get(request.request_id)
            if copy is not None and copy.has_seat and copy.computed and request.num_computed_tokens:
                for block_id in copy.live:
                    if blocks[block_id].ref_cnt < 1 and request.num_preemptions == copy.lost:
                        raise Broken(f"{request.request_id}: its state {block_id} was given away")

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in plan.preempted_req_ids:
            if request_id in self.copies:
                self.copies[request_id].has_seat = False
                self.copies[request_id].lost += 1
        for request_id in plan.finished_req_ids:
            self.copies.pop(request_id, None)
        for source, target in plan.kv_cache_block_copies:
            held = self.blocks.get(source)
            self.blocks[target] = dict(held) if isinstance(held, dict) else held
            self.drafter[target] = dict(self.drafter.get(source, {}))
        begun = self._tables(plan)
        rows = []
        for request in plan.scheduled:
            i = request.request_id
            if i not in self.copies:
                raise Broken(f"{i} is computed but was never described")
            rows.append((i, plan.num_scheduled_tokens[i], begun.get(i)))
        # A forward pass reads the states that were there, writes all pages, then reads pages.
        for i, _, hit in rows:
            self._read_states(i, hit)
        self.checkpoints = self.notes.pop(id(plan))
        self.planned_ends = {
            c.req_id: c.num_computed_tokens + plan.num_scheduled_tokens[c.req_id]
            for c in (*plan.scheduled_new_reqs, *plan.scheduled_cached_reqs)
        }
        chunks = {i: self._write_pages(plan, i, count) for i, count, _ in rows}
        for i in chunks:
            self._read_pages(i, chunks[i])
        results = {i: self._finish(plan, i, count, chunks[i]) for i, count, _ in rows}
        return ModelRunnerOutput(list(results), list(results.values()))

    def _tables(self, plan: SchedulerOutput) -> dict[str, int]:
        """Take over the block tables; return the hits of requests that begin."""
        begun = {}
        for new in plan.scheduled_new_reqs:
            if new.req_id in self.copies:
                raise Broken(f"{new.req_id} is new, but is known")
            salt = next(r for r in plan.scheduled if r.request_id == new.req_id).cache_salt
            tables = [list(ids) for ids in new.block_ids]
            self.copies[new.req_id] = Copy.of(list(new.prompt_token_ids), salt, tables)
            begun[new.req_id] = new.num_computed_tokens
        for cached in plan.scheduled_cached_reqs:
            copy = self.copies[cached.req_id]
            if cached.resumed_from_preemption:
                if not self.asynchronous and cached.all_token_ids != copy.tokens:
                    raise Broken(f"{cached.req_id} resumes with other tokens")
                copy.tables = [list(ids) for ids in cached.new_block_ids]
                copy.has_seat, copy.drafts = True, []
                begun[cached.req_id] = cached.num_computed_tokens
            else:
                if not copy.has_seat:
                    raise Broken(f"{cached.req_id} runs without a seat")
                for table, ids in zip(copy.tables, cached.new_block_ids, strict=True):
                    table += ids
                expected = cached.num_computed_tokens
                behind = expected - copy.computed
                if behind and not (self.asynchronous and behind > 0):
                    raise Broken(f"{cached.req_id} is at {copy.computed}, planned from {expected}")
        for i, hit in begun.items():
            copy = self.copies[i]
            if not 0 <= hit < len(copy.tokens):
                raise Broken(f"{i}: a hit of {hit} of {len(copy.tokens)} tokens leaves nothing")
            copy.computed = hit
            self.hits += hit > 0
            column = (cdiv(hit, self.config.block_size) - 1) if self.align else 0
            copy.live = [t[column] if hit else 0 for t in copy.tables[self.num_pages :]]
        return begun

    # -- states ------------------------------------------------------------------------------

    def _read_states(self, request_id: str, hit: int | None) -> None:
        copy = self.copies[request_id]
        if not copy.computed or not self.num_states:
            return
        expected = copy.digests[copy.computed], copy.computed
        for group, block_id in enumerate(copy.live):
            if self.blocks.get(block_id) != expected:
                what = "found by its hash" if hit else "its own"
                raise Broken(
                    f"{request_id}, state group {group}: the state in block {block_id}, {what}, is "
                    f"{self.blocks.get(block_id)}, expected {expected}"
                )

    def _write_states(self, request_id: str, begin: int, planned: int, end: int) -> None:
        """Write the states of a chunk that ends at ``planned``, of which ``end`` turned out right.

        Columns follow the plan: without asynchronous scheduling that is where the chunk ends.
        """
        copy, size = self.copies[request_id], self.config.block_size
        for group in range(self.num_states):
            table = copy.tables[self.num_pages + group]
            column = cdiv(self.planned_ends[request_id], size) - 1 if self.align else 0
            position, index = self.checkpoints[group].get(request_id, (0, 0))
            if begin < position < end and not self.verifies:
                self._put(table, index, copy, position)
            offset = 0
            if not self.verifies or not self.scratch:
                self._put(table, column, copy, end)
            else:
                for slot, place in enumerate(range(begin + 1, planned + 1)):
                    # Rejected drafts leave states that nobody may ever read.
                    digest = copy.digests[place] if place <= end else -1
                    self._put(table, column + slot, copy, place, digest)
                offset = end - begin - 1
            boundary = end // size * size
            if self.align and self.verifies and begin < boundary:
                self._put(table, boundary // size - 1, copy, boundary)
                if boundary // size - 1 == column:
                    offset = 0 if boundary == end else offset
            copy.live[group] = table[column + offset]

    def _put(
        self, table: list[int], column: int, copy: Copy, position: int, digest: int | None = None
    ) -> None:
        if column >= len(table) or table[column] == 0:
            raise Broken(f"no block in column {column} of {table} for the state at {position}")
        value = copy.digests[position] if digest is None else digest
        self.blocks[table[column]] = value, position

    # -- pages -------------------------------------------------------------------------------

    def _write_pages(self, plan: SchedulerOutput, request_id: str, count: int) -> tuple[int, int]:
        """Write the rows of a chunk; return where it begins and ends, drafts included."""
        copy = self.copies[request_id]
        begin = copy.computed
        end = begin + count
        drafts = len(plan.scheduled_spec_decode_tokens.get(request_id, ()))
        known = min(end, len(copy.tokens))
        if not count >= 1 or end - drafts > len(copy.tokens):
            raise Broken(f"{request_id}: {count} tokens from {begin} of {len(copy.tokens)} known")
        for group in range(self.num_pages):
            table = copy.tables[group]
            slots = min(end + self.lookahead, self.max_model_len)
            if cdiv(max(end, slots), self.page_size) > len(table):
                raise Broken(f"{request_id}: {len(table)} pages for {slots} tokens")
            for place in range(begin, end):
                block_id = table[place // self.page_size]
                page = self.blocks.get(block_id)
                if not isinstance(page, dict):
                    page = self.blocks[block_id] = {}
                page[place % self.page_size] = copy.digests[place + 1] if place < known else -1
        return begin, end

    def _read_pages(self, request_id: str, chunk: tuple[int, int]) -> None:
        copy, size = self.copies[request_id], self.page_size
        stop = min(chunk[1], len(copy.tokens))
        for group in range(self.num_pages):
            table, digests = copy.tables[group], copy.digests
            for column in range(cdiv(stop, size)):
                page = self.blocks.get(table[column])
                for place in range(column * size, min(column * size + size, stop)):
                    if not isinstance(page, dict) or page.get(place % size) != digests[place + 1]:
                        raise Broken(
                            f"{request_id}: the row of token {place} in block {table[column]} is "
                            "not its own"
                        )

    # -- sampling ----------------------------------------------------------------------------

    def _finish(
        self, plan: SchedulerOutput, request_id: str, count: int, chunk: tuple[int, int]
    ) -> list[int]:
        """Sample, verify drafts, draft anew."""
        copy, (begin, end) = self.copies[request_id], chunk
        planned = plan.scheduled_spec_decode_tokens.get(request_id, [])
        self.verifies = bool(planned)
        if len(planned) >= count:
            raise Broken(f"{request_id}: {len(planned)} drafts in {count} rows")
        if end - len(planned) < len(copy.tokens):  # inside the prompt
            self._write_states(request_id, begin, end, end)
            self._draft_rows(copy, begin, end)
            copy.computed = end
            return []
        drafts = list(planned)
        if self.asynchronous and -1 in drafts:  # only this side knows them
            drafts = (copy.drafts + [-1] * len(drafts))[: len(drafts)]
        sampled: list[int] = []
        digest = copy.digests[-1]
        for draft in [*drafts, None]:
            sampled.append(next_token(digest))
            if draft != sampled[-1]:
                break
            digest = extend(digest, sampled[-1])
        copy.append(sampled)
        # Accepted drafts have their rows; rows of the others are rubbish to be written over.
        accepted = len(sampled) - 1
        last = end - len(planned) + accepted
        for group in range(self.num_pages):
            for place in range(end - len(planned), last):
                page = self.blocks[copy.tables[group][place // self.page_size]]
                page[place % self.page_size] = copy.digests[place + 1]
        self._write_states(request_id, begin, end, last)
        self._draft_rows(copy, begin, last)
        copy.computed = last
        copy.drafts = self._propose(copy)
        return sampled

    def _draft_rows(self, copy: Copy, begin: int, end: int) -> None:
        """Write and read the rows of a drafter that looks at the token behind each."""
        if not self.reads_ahead:
            return
        for group in range(self.num_pages):
            table, size = copy.tables[group], self.page_size
            for place in range(begin, end):
                page = self.drafter.setdefault(table[place // size], {})
                page[place % size] = copy.digests[place + 2]
            for place in range(end):
                row = self.drafter.get(table[place // size], {}).get(place % size)
                if row != copy.digests[place + 2]:
                    raise Broken(f"the drafter's row of token {place} is not this request's")

    def _propose(self, copy: Copy) -> list[int]:
        """Draft tokens of which the first few are right."""
        k = self.scheduler.scheduler_config.num_speculative_tokens
        drafts, digest, right = [], copy.digests[-1], self.rng.randint(0, k)
        for position in range(k):
            token = next_token(digest)
            drafts.append(token if position < right else (token + 1) % VOCAB)
            digest = extend(digest, drafts[-1])
        return drafts
