"""Answer checks of lesson 13: what a command leaves open, who was late, a queue that takes turns.

Needs the standard library and the lab's recordings of vLLM's options. Answers are judged by what
must be true of them, over many cases drawn at random; nothing is compared with the lesson's own
solution.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from kimik3_lab.deploy.flags import load_release, releases
from kimik3_lab.reproduce.pins import Moved, moved_defaults

__all__ = ["check_1", "check_2", "check_3"]


def check_1(
    left_open: Callable[[Sequence[Moved], Sequence[str], Mapping[str, str]], Sequence[str]],
) -> None:
    """Check exercise 1: commands in every spelling that vLLM takes, for all pairs of releases.

    Raises
    ------
    AssertionError
        Naming the command, and the settings that were missed or named though they are settled.
    """
    rng, count = random.Random(13), 0
    versions = releases()
    for new in range(1, len(versions)):
        for old in range(new):
            moved = moved_defaults(versions[old], versions[new])
            for _ in range(6):
                words, variables, settled = _command(rng, moved, versions[new])
                expected = [m.name for m in moved if m.name not in settled]
                answer = left_open(moved, words, variables)
                assert not isinstance(answer, str) and isinstance(answer, (list, tuple, set)), (
                    f"expected a list of names, got {answer!r}"
                )
                name = f"{versions[old]} to {versions[new]}, command {' '.join(words)!r}"
                if variables:
                    name += f" with {variables}"
                missed = sorted(set(expected) - set(answer))
                wrong = sorted(set(answer) - set(expected))
                assert not missed, f"{name}: {', '.join(missed)} is left open, and not named"
                assert not wrong, f"{name}: {', '.join(wrong)} is settled (or did not move)"
                assert len(answer) == len(expected), f"{name}: something is named twice: {answer}"
                count += 1
    print(f"exercise 1: right for {count} commands")


def _command(
    rng: random.Random, moved: Sequence[Moved], version: str
) -> tuple[list[str], dict[str, str], set[str]]:
    """Draw a command, its environment, and which of the moved settings it settles."""
    words, variables, settled = ["moonshotai/Kimi-K3"], {"HF_HUB_OFFLINE": "1"}, set()
    release = load_release(version)
    for setting in moved:
        if rng.random() < 0.5:
            continue
        settled.add(setting.name)
        if setting.kind == "variable":
            variables[setting.name] = str(setting.pin)
            continue
        flag = release.flags.get(setting.name)
        name = setting.name.replace("-", "_").replace("__", "--", 1) if rng.random() < 0.3 else ""
        name = name or setting.name
        if flag is not None and flag.kind == "boolean":
            words.append(rng.choice((name, f"--no-{name.removeprefix('--')}")))
        elif rng.random() < 0.5:
            words.append(f"{name}={setting.pin}")
        else:
            words += [name, str(setting.pin)]
    # A name that begins alike, and one that is only a value, settle nothing.
    if rng.random() < 0.5:
        words += ["--max-num-batched-tokens-per-seat", "7"]
    if rng.random() < 0.5:
        words += ["--served-model-name", "max-num-batched-tokens"]
    return words, variables, settled


def check_2(
    late_share: Callable[[Mapping[float, float], Mapping[float, float], float], float | None],
) -> None:
    """Check exercise 2 against the requests themselves, of which a histogram keeps only counts.

    Raises
    ------
    AssertionError
        Naming the two readings, the limit, and what the share is.
    """
    rng = random.Random(14)
    bounds = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, float("inf"))
    for trial in range(60):
        earlier = [rng.expovariate(1.0) for _ in range(rng.randint(0, 40))]
        during = [rng.expovariate(rng.choice((0.3, 1.0, 4.0))) for _ in range(rng.randint(0, 40))]
        restarted = trial % 5 == 4 and len(during) < len(earlier)
        before = _histogram(earlier, bounds)
        after = _histogram(during if restarted else earlier + during, bounds)
        limit = rng.choice(bounds[:-1])
        late = sum(seconds > limit for seconds in during)
        expected = late / len(during) if during else None
        answer = late_share(before, after, limit)
        name = f"before {before}, after {after}, limit {limit} s"
        if restarted:
            name += " (the server was restarted in between, so its counts began at 0 again)"
        if expected is None:
            assert answer is None, f"{name}: no request ended, expected None, got {answer!r}"
            continue
        assert isinstance(answer, (int, float)) and not isinstance(answer, bool), (
            f"{name}: expected a share, got {answer!r}"
        )
        assert abs(answer - expected) < 1e-9, (
            f"{name}: {late} of {len(during)} requests took longer, a share of {expected:.4f}; "
            f"got {answer:.4f}"
        )
    print("exercise 2: right for 60 pairs of readings")


def _histogram(values: Sequence[float], bounds: Sequence[float]) -> dict[float, float]:
    return {bound: float(sum(value <= bound for value in values)) for bound in bounds}


def check_3(make_queue: Callable[[], Any]) -> None:
    """Check exercise 3 by what must hold of any fair queue, under operations drawn at random.

    Raises
    ------
    AssertionError
        Naming the rule that is broken, and the requests it was broken for.
    """
    for seed in range(40):
        _take_turns(make_queue, random.Random(seed))
    _turns_of_unequal_tenants(make_queue)
    print("exercise 3: right in 40 random worlds, and a greedy tenant does not matter")


def _request(number: int, tenant: str | None, length: int = 10) -> Any:
    return SimpleNamespace(
        request_id=f"r{number}", cache_salt=tenant, num_prompt_tokens=length, priority=0,
        arrival_time=float(number), max_tokens=8,
    )  # fmt: skip


def _take_turns(make_queue: Callable[[], Any], rng: random.Random) -> None:
    queue = make_queue()
    here: list[Any] = []
    put_back: set[str] = set()
    waited: Counter[str | None] = Counter()
    order: defaultdict[str | None, deque[str]] = defaultdict(deque)
    tenants = ["a", "b", "c", None]
    for number in range(rng.randint(10, 60)):
        action = rng.random()
        if action < 0.55 or not here:
            request = _request(number, rng.choice(tenants), rng.randint(1, 500))
            queue.add_request(request)
            here.append(request)
            order[request.cache_salt].append(request.request_id)
        elif action < 0.85:
            first = queue.peek_request()
            taken = queue.pop_request()
            assert taken is first, (
                f"peek_request said {first.request_id}, pop_request gave {taken.request_id}"
            )
            assert taken in here, f"{taken.request_id} came out, and was not in the queue"
            here.remove(taken)
            tenant = taken.cache_salt
            expected = order[tenant].popleft()
            assert taken.request_id == expected, (
                f"of tenant {tenant!r}, {expected} was first, and {taken.request_id} came out"
            )
            waiting = {r.cache_salt for r in here} | {tenant}
            for other in waiting - {tenant}:
                waited[other] += 1
                assert waited[other] < len(tenants) + 2, (
                    f"tenant {other!r} waits while others had {waited[other]} turns in a row; "
                    f"there are {len(tenants)} tenants"
                )
            waited[tenant] = 0
            if rng.random() < 0.3:  # preempted: back to the front of its own tenant
                queue.prepend_request(taken)
                here.append(taken)
                put_back.add(taken.request_id)
                order[tenant].appendleft(taken.request_id)
        else:
            gone = rng.choice(here)
            queue.remove_request(gone)
            here.remove(gone)
            order[gone.cache_salt].remove(gone.request_id)
            if not order[gone.cache_salt]:
                waited[gone.cache_salt] = 0
        assert len(queue) == len(here), f"the queue says {len(queue)}, {len(here)} are in it"
        assert bool(queue) == bool(here), "an empty queue must be false, any other true"
        found = sorted(r.request_id for r in queue)
        assert found == sorted(r.request_id for r in here), (
            f"a look through the queue finds {found}, in it are "
            f"{sorted(r.request_id for r in here)}"
        )


def _turns_of_unequal_tenants(make_queue: Callable[[], Any]) -> None:
    queue = make_queue()
    for number in range(20):
        queue.add_request(_request(number, "greedy"))
    for number in range(20, 23):
        queue.add_request(_request(number, "modest"))
    came = [queue.pop_request().cache_salt for _ in range(6)]
    assert came.count("modest") == 3, (
        "20 requests of one tenant and 3 of another wait: of the first six turns each should have "
        f"three, got {came}"
    )
    assert all(one != two for one, two in pairwise(came)), (
        f"two tenants should take turns, one each; got {came}"
    )
