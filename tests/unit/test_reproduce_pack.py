"""What a reproduction pack holds: every moved default pinned, fresh seeds, enough requests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from pydantic import ValidationError

from kimik3_lab.deploy.flags import check_command, releases
from kimik3_lab.reproduce.b300 import b300_pack
from kimik3_lab.reproduce.cpu import cpu_pack
from kimik3_lab.reproduce.pack import MIN_REQUESTS, Pack, PackError, load_pack
from kimik3_lab.reproduce.pins import Moved, moved_defaults, new_options, pinned_value

LATER = releases()[1:]


@pytest.mark.parametrize("improved", LATER)
def test_every_default_that_moved_has_one_value_in_all_servers(improved: str) -> None:
    moved = moved_defaults("0.27.1", improved)
    names = {m.name for m in moved}
    assert {"--max-num-batched-tokens", "--enable-prefix-caching"} <= names
    assert ("VLLM_ALLREDUCE_USE_FLASHINFER" in names) == (improved != "0.28.0")
    pack = b300_pack("0.27.1", improved, seed=1)
    for name in names:
        values = {pinned_value(name, arm.arguments, arm.environment) for arm in pack.arms}
        assert len(values) == 1 and None not in values, name
    assert {pin.name for pin in pack.pins} == names
    for pin in pack.pins:
        assert pin.pinned not in ("None", "")


@pytest.mark.parametrize("improved", LATER)
def test_each_release_takes_its_commands(improved: str) -> None:
    for arm in b300_pack("0.27.1", improved, seed=1).arms:
        problems = check_command(arm.version, arm.arguments, arm.environment)
        # A default that moved on the way out can only be pinned by an option that is on its way.
        assert {p.where for p in problems} <= {"--disable-cascade-attn", "--mamba-cache-mode"}
        assert not any(p.fatal for p in problems)


def test_each_release_can_keep_its_own_defaults() -> None:
    pack = b300_pack(defaults="release", seed=1)
    tokens = {
        arm.version: pinned_value("--max-num-batched-tokens", arm.arguments, {})
        for arm in pack.arms
    }
    assert tokens == {"0.27.1": "8192", "0.30.0": "16384"}
    assert pack.pins == ()


def test_what_the_published_figures_leave_open_is_asked() -> None:
    pack = b300_pack(seed=1)
    cells = {(cell.arm, cell.name): cell for cell in pack.cells}
    for version in ("0.27.1", "0.30.0"):
        for drafts in (8, 4, 0):
            cell = cells[f"v{version}-k{drafts}", "c1"]
            assert (cell.prompt_tokens, cell.output_tokens) == (8000, 1000)
        lengths = {c.prompt_tokens for (arm, _), c in cells.items() if arm == f"v{version}-k8"}
        assert {128, 4000, 8000} <= lengths
        for streams in (1, 4, 16):
            # With and without drafts.
            assert {f"c{streams}"} <= {n for a, n in cells if a == f"v{version}-k0"}
    for cell in pack.cells:
        # Of requests sent, the middle 80 % of the time counts.
        assert 0.8 * (cell.num_requests - cell.concurrency) >= MIN_REQUESTS
    for arm in pack.arms:
        assert "--enable-prompt-tokens-details" in arm.arguments
        assert ("--speculative-config" in arm.arguments) == (arm.drafts > 0)
        assert "0.0.0.0" not in arm.arguments


def test_seeds_are_fresh_and_never_come_twice() -> None:
    first, second = b300_pack(), b300_pack()
    seeds = [cell.seed for pack in (first, second) for cell in pack.cells]
    assert len(set(seeds)) == len(seeds)
    assert b300_pack(seed=3) == b300_pack(seed=3)


@pytest.mark.parametrize("pack", [b300_pack(seed=1), cpu_pack(seed=1)], ids=["b300", "cpu"])
def test_the_description_is_read_back(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "pack.json").write_text(pack.dump(), encoding="utf-8")
    assert load_pack(tmp_path) == pack
    assert load_pack(tmp_path).dump() == pack.dump()


def _broken(change: dict[str, object], where: tuple[str, int] | None = None) -> str:
    body = json.loads(b300_pack(seed=1).dump())
    target = body if where is None else body[where[0]][where[1]]
    target.update(change)
    return json.dumps(body)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_broken({"num_requests": 99}, ("cells", 0)), "at least 100 have to end"),
        (_broken({"min_requests": 10}), "needs 100 requests"),
        (_broken({"seed": json.loads(b300_pack(seed=1).dump())["cells"][1]["seed"]}, ("cells", 0)),
         "a seed comes twice"),
        (_broken({"arm": "v0.26"}, ("cells", 0)), "belongs to no server"),
        (_broken({"name": "c4"}, ("cells", 0)), "two cells of one server"),
        (_broken({"name": "v0.27.1-k4"}, ("arms", 0)), "two servers have one name"),
        (_broken({"name": "a; rm -rf"}, ("arms", 0)), "String should match pattern"),
        (_broken({"arguments": ["K3", "--kda-decode-backend", "auto"]}, ("arms", 0)),
         "0.30.0 and later have it"),
        (_broken({"colour": "blue"}), "Extra inputs"),
    ],
)  # fmt: skip
def test_a_damaged_description_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pack.json").write_text(text, encoding="utf-8")
    with pytest.raises(PackError, match=message):
        load_pack(tmp_path)
    with pytest.raises(ValidationError):
        Pack.model_validate_json(text)


def test_no_pack_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"no pack\.json"):
        load_pack(tmp_path)


@pytest.mark.parametrize(
    ("baseline", "improved", "message"),
    [
        ("0.27.1", "0.27.1", "a later release than baseline"),
        ("0.28", "0.28.0", "got 0.28.0 and then 0.28.0"),
        ("0.33.0", "0.27.1", "got 0.33.0 and then 0.27.1"),
        ("0.11.0", "0.30.0", "no options were recorded"),
    ],
)
def test_releases_that_cannot_be_compared(baseline: str, improved: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        b300_pack(baseline, improved)


def test_a_release_by_its_short_name_is_the_same_release() -> None:
    assert b300_pack("0.28", "0.30", seed=1) == b300_pack("0.28.0", "0.30.0", seed=1)


@pytest.mark.parametrize(
    ("pin", "words"),
    [(True, "--x"), (False, "--no-x"), (8, "--x 8"), ("ag_rs", "--x ag_rs")],
)
def test_a_pin_as_words(pin: object, words: str) -> None:
    assert Moved("option", "--x", None, None, pin).words == tuple(shlex.split(words))


def test_nothing_moved_from_a_release_to_itself() -> None:
    assert moved_defaults("0.30.0", "0.30.0") == []
    assert new_options("0.30.0", "0.30.0") == []
