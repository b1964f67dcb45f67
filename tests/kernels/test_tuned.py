"""The tables of measured launch constants: look-up, storing, damage, and what the package ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from k3_kernels import tuned
from k3_kernels.attn_res import AttnResConfig
from k3_kernels.dispatch import DispatchConfig
from k3_kernels.finalize import FinalizeConfig
from k3_kernels.kda_decode import KDADecodeConfig
from k3_kernels.kda_prefill import KDAPrefillConfig
from k3_kernels.kda_recover import KDARecoverConfig
from k3_kernels.mla_decode import MLADecodeConfig
from k3_kernels.moe_config import MoEConfig
from k3_kernels.routing import RouteConfig

GPU = torch.device("cuda", 0)
BUCKETS = [{"up_to": 8, "config": {"warps": 1}}, {"up_to": None, "config": {"warps": 4}}]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of tables, on a machine with one imaginary GPU."""
    monkeypatch.setenv("K3_KERNELS_TUNED", str(tmp_path))
    monkeypatch.setattr(tuned, "_device_name", lambda index: "ACME G-1")
    return tmp_path


def test_unknown_devices_operators_shapes_and_sizes_have_none(table: Path) -> None:
    assert tuned.lookup("routing", "E=4", 1, GPU) is None
    tuned.store("ACME G-1", "routing", "E=4", BUCKETS[:1], {})
    assert tuned.lookup("routing", "E=4", 8, GPU) == {"warps": 1}
    assert tuned.lookup("routing", "E=4", 9, GPU) is None
    assert tuned.lookup("routing", "E=5", 1, GPU) is None
    assert tuned.lookup("dispatch", "E=4", 1, GPU) is None
    assert tuned.lookup("routing", "E=4", 1, torch.device("cpu")) is None


def test_storing_keeps_every_other_entry(table: Path) -> None:
    tuned.store("ACME G-1", "routing", "E=4", BUCKETS, {"made": "first"})
    tuned.store("ACME G-1", "routing", "E=5", BUCKETS[:1], {})
    path = tuned.store("ACME G-1", "routing", "E=4", BUCKETS[1:], {"made": "second"})
    assert path == table / "acme_g_1.json" and list(table.iterdir()) == [path]
    assert tuned.lookup("routing", "E=4", 1, GPU) == {"warps": 4}
    assert tuned.lookup("routing", "E=5", 1, GPU) == {"warps": 1}
    entry = json.loads(path.read_text(encoding="utf-8"))["operators"]["routing"]["E=4"]
    assert entry["provenance"] == {"made": "second"}


def test_a_whole_entry_can_be_read(table: Path) -> None:
    assert tuned.stored("ACME G-1", "routing", "E=4") is None
    tuned.store("ACME G-1", "routing", "E=4", BUCKETS, {"made": "here"})
    entry = {"provenance": {"made": "here"}, "buckets": BUCKETS}
    assert tuned.stored("ACME G-1", "routing", "E=4") == entry
    assert tuned.stored("ACME G-1", "routing", "E=5") is None
    assert tuned.stored("ACME G-1", "dispatch", "E=4") is None


def test_what_a_caller_does_to_its_constants_stays_with_it(table: Path) -> None:
    tuned.store("ACME G-1", "routing", "E=4", BUCKETS, {})
    found = tuned.lookup("routing", "E=4", 1, GPU)
    assert found is not None
    found["warps"] = 99
    assert tuned.lookup("routing", "E=4", 1, GPU) == {"warps": 1}


@pytest.mark.parametrize("order", [BUCKETS[::-1], [BUCKETS[0]] * 2, []])
def test_buckets_must_ascend(table: Path, order: list[dict[str, object]]) -> None:
    with pytest.raises(ValueError, match="up_to must ascend, with None last"):
        tuned.store("ACME G-1", "routing", "E=4", order, {})
    assert not list(table.iterdir())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema_version": 2, "operators": {}}', '{"schema_version": 1}']
)
def test_a_damaged_table_is_not_taken_for_none(table: Path, text: str) -> None:
    (table / "acme_g_1.json").write_text(text, encoding="utf-8")
    tuned._operators.cache_clear()
    with pytest.raises(ValueError, match="is not a table of launch constants"):
        tuned.lookup("routing", "E=4", 1, GPU)
    with pytest.raises(ValueError, match="Restore it, or delete it"):
        tuned.store("ACME G-1", "routing", "E=4", BUCKETS, {})
    tuned._operators.cache_clear()


def test_shipped_tables_fit_the_operators() -> None:
    """A field that an operator no longer has would only show on that GPU."""
    kinds = {
        "attn_res": AttnResConfig,
        "dispatch": DispatchConfig,
        "finalize": FinalizeConfig,
        "kda_decode": KDADecodeConfig,
        "kda_prefill": KDAPrefillConfig,
        "kda_recover": KDARecoverConfig,
        "kda_verify": KDADecodeConfig,
        "mla_decode": MLADecodeConfig,
        "moe": MoEConfig,
        "routing": RouteConfig,
    }
    paths = sorted((Path(tuned.__file__).parent / "tuned").glob("*.json"))
    assert [path.name for path in paths] == ["nvidia_h200.json"]
    for path in paths:
        table = json.loads(path.read_text(encoding="utf-8"))
        assert tuned.device_file(table["device"]) == path.name
        assert set(kinds) <= set(table["operators"])
        for operator, kind in kinds.items():
            for shape, entry in table["operators"][operator].items():
                assert {"triton", "torch", "date_utc"} <= set(entry["provenance"])
                command = entry["provenance"]["command"]
                assert " /" not in command, f"a folder of the machine that measured: {command}"
                assert entry["buckets"][-1]["up_to"] is None, f"{operator} {shape} has an end"
                for bucket in entry["buckets"]:
                    kind(**bucket["config"])
