"""The fixtures are the recorded ones, all of them are accounted for, and they stay small."""

import hashlib
import json

import golden_cases
import pytest

PROVENANCE = json.loads((golden_cases.GOLDEN / "PROVENANCE.json").read_text())
ROOT = golden_cases.GOLDEN.parents[1]


def test_every_fixture_has_a_provenance_entry_and_the_other_way_round():
    assert {path.name for path in golden_cases.GOLDEN.glob("*.safetensors")} == set(
        PROVENANCE["fixtures"]
    )


@pytest.mark.parametrize("name", PROVENANCE["fixtures"])
def test_fixture_is_the_one_that_was_recorded(name):
    entry = PROVENANCE["fixtures"][name]
    content = (golden_cases.GOLDEN / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    assert (ROOT / entry["script"]).is_file()
    for key in ("package", "version", "licence", "date_utc", "sources"):
        assert entry[key], key


def test_fixtures_stay_small():
    total = sum(path.stat().st_size for path in golden_cases.GOLDEN.iterdir())
    assert total < 3_000_000, f"{total:,} bytes in data/golden"
