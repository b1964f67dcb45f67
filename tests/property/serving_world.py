"""A scheduler, an executor with a memory, clients who come and go, and what must always hold.

:class:`World` is driven by plain random numbers for the bulk of the steps and by hypothesis where a
short counterexample is wanted.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from typing import Any

from memory_executor import EOS, VOCAB, Broken, MemoryExecutor, extend, next_token, start

from kimik3_lab.serving import CacheConfig, Request, SamplingParams, Scheduler, SchedulerConfig
from kimik3_lab.serving.async_scheduler import make_scheduler

__all__ = ["World", "run"]


class World:
    """One run.

    Parameters
    ----------
    configs : tuple of SchedulerConfig, CacheConfig
        What to run under.
    rng : random.Random
        Draws prompts, drafts and who leaves.
    """

    def __init__(self, configs: tuple[SchedulerConfig, CacheConfig], rng: Random) -> None:
        self.config, self.cache_config = configs
        self.rng = rng
        self.scheduler: Scheduler = make_scheduler(*configs)
        self.executor = MemoryExecutor(self.scheduler, rng)
        self.depth = 2 if self.config.async_scheduling else 1
        self.plans: deque[Any] = deque()
        self.orders: dict[str, tuple[Any, ...]] = {}  # of arrival, of those never admitted
        self.wanted: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.known: dict[bytes, tuple[int, int]] = {}
        self.trunks = [[rng.randrange(2, VOCAB) for _ in range(40)] for _ in range(2)]
        self.counts: Counter[str] = Counter()
        self.said_again: set[str] = set()  # preempted in a step that failed
        self.idle = 0

    # -- clients -----------------------------------------------------------------------------

    def arrive(self) -> bool:
        """Add a request, often one that begins like another; False if it is refused."""
        rng, name = self.rng, f"r{len(self.wanted)}"
        length = rng.randint(1, min(30, self.config.max_model_len - 1))
        prompt = list(rng.choice(self.trunks)[: rng.randint(0, length)])
        while len(prompt) < length:
            prompt.append(rng.randrange(2, VOCAB))
        salt = "salt" if rng.random() < 0.1 else None
        request = Request(
            name,
            prompt,
            SamplingParams(max_tokens=rng.randint(1, 14)),
            eos_token_id=EOS,
            arrival_time=float(len(self.wanted) // 2),
            priority=rng.randint(0, 2),
            cache_salt=salt,
        )
        try:
            self.scheduler.add_request(request)
        except ValueError:
            self.counts["refused"] += 1
            return False
        order = (request.priority, request.arrival_time) if self.config.policy == "priority" else ()
        self.orders[name] = (*order, len(self.wanted))
        self.wanted[name] = self._undisturbed(prompt, request.max_tokens, salt)
        self.got[name] = []
        if rng.random() < 0.3:
            self.trunks[rng.randrange(2)] = prompt + self.wanted[name]
        return True

    def _undisturbed(self, prompt: list[int], max_tokens: int, salt: str | None) -> list[int]:
        digest = start(salt)
        for token in prompt:
            digest = extend(digest, token)
        tokens: list[int] = []
        while len(tokens) < max_tokens and len(prompt) + len(tokens) < self.config.max_model_len:
            tokens.append(next_token(digest))
            digest = extend(digest, tokens[-1])
            if tokens[-1] == EOS:
                break
        return tokens

    def leave(self) -> None:
        """Abort somebody."""
        if self.scheduler.requests:
            name = self.rng.choice(sorted(self.scheduler.requests))
            news = self.scheduler.abort(name)
            if news is None or news.finish_reason != "abort":
                raise Broken(f"{name} was aborted, and the news is {news}")
            self.reasons[name] = "abort"
            self.orders.pop(name, None)
            self.counts["aborts"] += 1

    # -- steps -------------------------------------------------------------------------------

    def step(self, *, abort_in_flight: bool = False, fails: str | None = None) -> None:
        """Plan, execute and book a step; check everything before and after.

        ``fails`` has the executor fail ``"before"`` or ``"after"`` its work, which is possible one
        step at a time only.
        """
        scheduler = self.scheduler
        plan = scheduler.schedule()
        self.executor.note(plan)
        self._check_plan(plan)
        self.check_blocks()
        if fails and self.depth == 1 and plan.num_scheduled_tokens:
            self._fail(plan, fails)
        else:
            self.plans.append(plan)
            if abort_in_flight:
                self.leave()
            if len(self.plans) == self.depth or not plan.num_scheduled_tokens:
                self._answer(self.plans.popleft())
        self.check_blocks()
        if not self.plans:
            self._check_cache()
        self.counts["steps"] += 1

    def _fail(self, plan: Any, when: str) -> None:
        if when == "after":
            self.executor.execute_model(plan)
        for news in self.scheduler.fail_step(plan):
            self.reasons[news.request_id] = "error"
        self.said_again = set(plan.preempted_req_ids)
        self.counts["failed"] += 1

    def _answer(self, plan: Any) -> None:
        result = self.executor.execute_model(plan)
        for news in self.scheduler.update_from_output(plan, result):
            name = news.request_id
            if name in self.reasons:
                raise Broken(f"news of {name}, which has ended")
            self.got[name] += news.new_token_ids
            if self.got[name] != self.wanted[name][: len(self.got[name])]:
                raise Broken(f"{name} got {self.got[name]}, undisturbed {self.wanted[name]}")
            if news.finish_reason is not None:
                self.reasons[name] = news.finish_reason
                if self.got[name] != self.wanted[name]:
                    raise Broken(f"{name} ended after {self.got[name]} of {self.wanted[name]}")
        if self.config.num_speculative_tokens and not self.config.async_scheduling:
            copies = self.executor.copies
            self.scheduler.update_draft_token_ids(
                {
                    r.request_id: copies[r.request_id].drafts
                    for r in plan.scheduled
                    if r.request_id in copies and self.rng.random() < 0.9
                }
            )

    def drain(self, limit: int = 1500) -> None:
        """Step until all have ended."""
        for _ in range(limit):
            if not (self.scheduler.has_requests() or self.plans):
                break
            if not self.scheduler.has_requests():
                self._answer(self.plans.popleft())
                continue
            self.step()
        else:
            left = list(self.scheduler.requests.values())
            raise Broken(f"{limit} steps and no end: {left}")
        if self.wanted.keys() != self.reasons.keys():
            raise Broken("somebody was forgotten")
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != self.cache_config.num_usable_blocks:
            raise Broken(f"{free} of {self.cache_config.num_usable_blocks} blocks are free at last")

    # -- what must hold ----------------------------------------------------------------------

    def _check_plan(self, plan: Any) -> None:
        config, scheduler = self.config, self.scheduler
        counts, total = plan.num_scheduled_tokens, sum(plan.num_scheduled_tokens.values())
        if plan.total_num_scheduled_tokens != total or total > config.scheduled_token_limit:
            raise Broken(f"{total} tokens scheduled, the budget is {config.scheduled_token_limit}")
        rows = total
        if config.token_budget != "static":
            rows += config.num_draft_slots * len(counts)
        if rows > config.max_num_batched_tokens or min(counts.values(), default=1) < 1:
            raise Broken(f"{rows} rows of {config.max_num_batched_tokens}: {counts}")
        threshold = config.long_prefill_token_threshold
        if threshold and len(scheduler.requests) > 1:
            if config.long_prefill_token_threshold_adaptive:
                share = config.max_num_batched_tokens // len(scheduler.requests)
                threshold = max(threshold, share)
            if max(counts.values(), default=0) > threshold:
                raise Broken(f"the threshold is {threshold}: {counts}")
        described = [d.req_id for d in (*plan.scheduled_cached_reqs, *plan.scheduled_new_reqs)]
        if sorted(described) != sorted(counts) or [r.request_id for r in plan.scheduled] != list(
            counts
        ):
            raise Broken(f"described {described}, scheduled {counts}")
        running = {r.request_id for r in scheduler.running}
        if len(running) != len(scheduler.running) or len(running) > config.active_seqs_limit:
            raise Broken(f"{len(scheduler.running)} run: {running}")
        waiting = [r.request_id for r in scheduler.waiting]
        if sorted([*waiting, *running]) != sorted(scheduler.requests):
            raise Broken(f"running {running} and waiting {waiting} of {list(scheduler.requests)}")
        preempted = plan.preempted_req_ids - self.said_again
        if not counts.keys() <= running or counts.keys() & preempted:
            raise Broken("scheduled without a seat, or preempted and scheduled")
        if preempted and plan.scheduled_new_reqs:
            raise Broken("somebody was admitted in a step that preempts")
        if scheduler.has_requests() and not counts and not self.plans:
            self.idle += 1
            if self.idle > 1:
                raise Broken(f"no progress: {list(scheduler.requests.values())}")
        else:
            self.idle = 0
        for new in plan.scheduled_new_reqs:
            order = self.orders.pop(new.req_id)
            earlier = [name for name, other in self.orders.items() if other < order]
            if config.policy == "fcfs":  # who had a seat before comes first
                earlier += [r.request_id for r in scheduler.waiting if r.num_preemptions]
            if earlier and config.batching == "continuous" and not self._stale():
                raise Broken(f"{new.req_id} overtook {earlier}")
        self.counts["preemptions"] += len(preempted)
        self.said_again = set()

    def _stale(self) -> bool:
        """Whether a preempted request must wait for output that is in flight."""
        return any(request.num_stale_output_tokens for request in self.scheduler.waiting)

    def check_blocks(self) -> None:
        """No block is lost, held twice without being counted, or free and held."""
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        holders: Counter[int] = Counter()
        for group in manager.managers:
            if not group.req_to_blocks.keys() <= self.scheduler.requests.keys():
                raise Broken("blocks of a request that has ended")
            for blocks in group.req_to_blocks.values():
                holders.update(block.block_id for block in blocks if not block.is_null)
            for pair in group.pending_copies:
                holders.update(block.block_id for block in pair)
        for block in pool.blocks[1:]:
            if block.ref_cnt != holders[block.block_id]:
                raise Broken(
                    f"block {block.block_id} counts {block.ref_cnt} holders, has "
                    f"{holders[block.block_id]}"
                )
        free = pool.get_num_free_blocks()
        if free + len(holders) != self.cache_config.num_usable_blocks:
            raise Broken(f"{free} free and {len(holders)} held blocks")

    def _check_cache(self) -> None:
        """Whatever can be found by hash was computed, and is what the hash says."""
        if not self.cache_config.enable_prefix_caching:
            return
        unit = self.cache_config.hash_block_size
        for name, copy in self.executor.copies.items():
            request = self.scheduler.requests.get(name)
            if request is not None:
                for index, block_hash in enumerate(request.block_hashes):
                    end = (index + 1) * unit
                    if self.known.setdefault(block_hash, (copy.digests[end], end)) != (
                        copy.digests[end],
                        end,
                    ):
                        raise Broken("one hash for two prefixes")
        pages = self.cache_config.num_attention_groups
        for (
            block_hash,
            group,
        ), blocks in self.scheduler.kv_cache_manager.block_pool._by_hash.items():
            if block_hash not in self.known:
                continue  # of a request that was never executed
            digest, end = self.known[block_hash]
            for block_id in blocks:
                held: Any = self.executor.blocks.get(block_id)
                if group < pages:
                    offset = (end - 1) % self.executor.page_size
                    held = (held.get(offset), end) if isinstance(held, dict) else held
                if held != (digest, end):
                    raise Broken(
                        f"block {block_id} of group {group} is to hold the first {end} tokens, "
                        f"it holds {held}"
                    )


def run(world: World) -> World:
    """Let clients come and go at random for a while, then wait for the rest."""
    rng = world.rng
    for _ in range(rng.randint(5, 40)):
        while rng.random() < 0.4:
            world.arrive()
        if rng.random() < 0.05:
            world.leave()
        fails = rng.choice(["before", "after"]) if rng.random() < 0.02 else None
        world.step(abort_in_flight=rng.random() < 0.05, fails=fails)
    world.drain()
    return world
