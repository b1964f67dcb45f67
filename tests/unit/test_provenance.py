"""A result file is made to be shared: it says where a number came from, and holds no secret."""

from __future__ import annotations

import sys

import pytest

from kimik3_lab.provenance import provenance


@pytest.mark.parametrize(
    "words", [["--api-key", "sk-secret", "--scale", "50"], ["--api-key=sk-secret", "--scale", "50"]]
)
def test_keys_are_blanked_out(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/k3lab", "bench", *words])
    command = provenance()["command"]
    assert "secret" not in command and "/somewhere" not in command
    assert command.startswith("k3lab bench ") and command.endswith("--scale 50")
    assert "--api-key" in command


def test_says_what_repeats_it() -> None:
    found = provenance(device="H200", command="make it")
    assert (found["device"], found["command"]) == ("H200", "make it")
    assert found["packages"]["torch"] and found["date_utc"] and found["python"]
