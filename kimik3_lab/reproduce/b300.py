"""The pack for a node of eight B300: the published comparison, and what would settle its questions.

Needs pydantic. Lesson 13 and ``k3lab reproduce b300`` use it. Beside the published cells (8,000
tokens in, 1,000 out, 1, 4 and 16 streams) there are those that the published figures cannot answer:
the same runs without speculation, shorter drafts, and short prompts. The lab's cost model can be
refitted with them.
"""

from __future__ import annotations

import math
import random
import secrets
from typing import Literal

from kimik3_lab.deploy.flags import load_release, releases
from kimik3_lab.deploy.plan import plan
from kimik3_lab.deploy.spec import DeploymentSpec
from kimik3_lab.performance.published import OUTPUT_TOKENS, PROMPT_TOKENS
from kimik3_lab.reproduce.pack import MIN_REQUESTS, Arm, Cell, Pack, Pin
from kimik3_lab.reproduce.pins import Moved, moved_defaults, new_options, pinned_value

__all__ = ["b300_pack", "draw_seeds", "requests_for"]

#: Tokens of a draft: the published eight, half of it, none.
DRAFTS = (8, 4, 0)
#: Prompt lengths of the cells that separate launch overhead from prefill; their answers are short.
SHORT_PROMPTS, SHORT_OUTPUT = (128, 512, 1000, 2000, 4000), 100


def requests_for(min_requests: int, concurrency: int) -> int:
    """Return how many requests to send so that ``min_requests`` end in the middle 80 % of a cell.

    Examples
    --------
    >>> [requests_for(100, c) for c in (1, 4, 16)]
    [132, 138, 162]
    """
    return math.ceil(1.3 * min_requests) + 2 * concurrency


def draw_seeds(count: int, seed: int | None) -> list[int]:
    """Seeds that differ; fresh ones without ``seed``."""
    rng = random.Random(secrets.randbits(64) if seed is None else seed)
    return rng.sample(range(1 << 32), count)


def b300_pack(
    baseline: str = "0.27.1",
    improved: str = "0.30.0",
    *,
    defaults: Literal["common", "release"] = "common",
    tokenizer: str | None = None,
    model: str | None = None,
    seed: int | None = None,
) -> Pack:
    """Make the pack for one node of eight B300.

    Parameters
    ----------
    baseline, improved
        Recorded releases of vLLM. The post's second version was the main branch of 13 September,
        a commit before 0.30.0.
    defaults
        ``common``: each default that moved is pinned to one value for both, so that code is
        compared. ``release``: each release keeps its own, written down, as in the post.
    tokenizer
        Folder with ``tokenizer.json`` for prompts of an exact length.
    model
        Checkpoint; the released one by default.
    seed
        Draws the same prompts again; fresh ones by default.

    Raises
    ------
    ValueError
        If a release was not recorded, or ``improved`` is not the later of the two.

    Examples
    --------
    >>> pack = b300_pack(seed=1)
    >>> [arm.name for arm in pack.arms][:3], len(pack.cells)
    (['v0.27.1-k8', 'v0.27.1-k4', 'v0.27.1-k0'], 24)
    """
    # In full, so that 0.28 and 0.28.0 are one.
    baseline, improved = load_release(baseline).version, load_release(improved).version
    if releases().index(baseline) >= releases().index(improved):
        raise ValueError(
            f"improved must be a later release than baseline, got {baseline} and then {improved}"
        )
    moved = moved_defaults(baseline, improved)
    arms = [
        _arm(version, drafts, defaults, model, moved)
        for version in (baseline, improved)
        for drafts in DRAFTS
    ]
    shapes = [(arm.name, *shape) for arm in arms for shape in _shapes(arm.drafts)]
    cells = [
        Cell(
            arm=arm, name=name, concurrency=concurrency, prompt_tokens=prompt,
            output_tokens=output, num_requests=requests_for(MIN_REQUESTS, concurrency), seed=number,
        )
        for (arm, name, concurrency, prompt, output), number in zip(
            shapes, draw_seeds(len(shapes), seed), strict=True
        )
    ]  # fmt: skip
    pins = [
        Pin(
            name=m.name,
            before=str(m.before),
            after=str(m.after),
            pinned=str(pinned_value(m.name, arms[0].arguments, arms[0].environment)),
        )
        for m in moved
    ]
    return Pack(
        kind="b300",
        what=f"Kimi K3 on vLLM {baseline} and {improved}, 8 x B300, TP8, "
        f"{PROMPT_TOKENS:,}/{OUTPUT_TOKENS:,} tokens",
        device="8 x B300",
        tokenizer=tokenizer,
        arms=tuple(arms),
        cells=tuple(cells),
        pins=tuple(pins) if defaults == "common" else (),
        not_pinned=tuple(new_options(baseline, improved)),
    )


def _shapes(drafts: int) -> list[tuple[str, int, int, int]]:
    """Name, streams, prompt and answer of each cell of a server."""
    published = [(f"c{c}", c, PROMPT_TOKENS, OUTPUT_TOKENS) for c in (1, 4, 16)]
    if drafts == DRAFTS[0]:
        short = [(f"c1-isl{length}", 1, length, SHORT_OUTPUT) for length in SHORT_PROMPTS]
        return published + short
    return published if not drafts else published[:1]


def _arm(version: str, drafts: int, defaults: str, model: str | None, moved: list[Moved]) -> Arm:
    wanted = {"vllm": version, "hardware": "b300", "strategy": "tp", "defaults": defaults}
    if drafts:
        wanted |= {"spec": "dspark", "num_speculative_tokens": drafts}
    if model is not None:
        wanted["model"] = model
    (node,) = plan(DeploymentSpec.model_validate(wanted)).nodes
    # The client runs beside the server: nobody else has to reach it.
    arguments = ["127.0.0.1" if word == "0.0.0.0" else word for word in node.arguments()]
    # Else no answer would say how much of its prompt came from the cache.
    arguments.append("--enable-prompt-tokens-details")
    environment = node.environment()
    for m in moved if defaults == "common" else ():
        if pinned_value(m.name, arguments, environment) is None:
            if m.kind == "option":
                arguments += m.words
            else:
                environment[m.name] = str(m.pin)
    return Arm(
        name=f"v{version}-k{drafts}",
        version=version,
        drafts=drafts,
        arguments=tuple(arguments),
        environment=environment,
    )
