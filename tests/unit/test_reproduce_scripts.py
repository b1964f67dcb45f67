"""The scripts of a pack: bash reads them, and they run a whole pack against stand-ins."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kimik3_lab.reproduce.b300 import b300_pack
from kimik3_lab.reproduce.cpu import cpu_pack
from kimik3_lab.reproduce.pack import Arm, Cell, Pack, PackError
from kimik3_lab.reproduce.scripts import runner, server_script, write_pack

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "curl", "setsid"))), reason="needs bash, curl and setsid"
)

#: Answers /health and /metrics, and says which experts it computes with.
SERVER = """#!{python}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if sys.argv[1] == "--version":
    sys.exit(print("{version}"))
if "fail" in sys.argv:
    sys.exit("out of memory")
print("INFO Using 'MARLIN' Mxfp4 MoE backend.", " ".join(sys.argv[1:]), flush=True)
looks = 0

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global looks
        looks += self.path == "/metrics"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'vllm:prompt_tokens_total{{engine="0"}} %d.0\\n' % looks)

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
CLIENT = """#!/usr/bin/env bash
set -eu
printf '%q ' "$@" >>"$CALLS"
printf '\\n' >>"$CALLS"
[[ "$*" != *"--seed $FAIL_SEED "* ]] || exit 1
while [[ "$1" != --output ]]; do shift; done
printf '{}' >"$2"
"""


def tiny_pack(*words: str) -> Pack:
    arms = [Arm(name=f"v{v}", version=v, drafts=0, arguments=("model dir", *words))
            for v in ("0.27.1", "0.30.0")]  # fmt: skip
    cells = [
        Cell(arm=arm.name, name=f"c{c}", concurrency=c, prompt_tokens=8, output_tokens=4,
             num_requests=8, seed=10 * number + c)
        for number, arm in enumerate(arms) for c in (1, 2)
    ]  # fmt: skip
    return Pack(kind="cpu", what="stand-ins", device="it's 8 x B300", min_requests=4,
                arms=arms, cells=cells)  # fmt: skip


class Machine:
    """A machine with stand-ins for two releases of vLLM and for the client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.environment = os.environ | {
            "K3LAB": self.program("k3lab", CLIENT),
            "PORT": str(port),
            "CALLS": str(self.calls),
            "FAIL_SEED": "-",
            "READY_SECONDS": "30",
        }
        for version in ("0.27.1", "0.30.0"):
            text = SERVER.format(python=sys.executable, version=f"v{version}")
            name = f"VLLM_COMMAND_{version.replace('.', '_')}"
            self.environment[name] = self.program(f"vllm-{version}", text)

    def program(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    def run(self, pack: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(pack / "run.sh")], env=self.environment | variables,
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("pack", [b300_pack(seed=1), cpu_pack(seed=1)], ids=["b300", "cpu"])
def test_bash_reads_every_script(pack: Pack) -> None:
    scripts = [runner(pack), *(server_script(pack, arm) for arm in pack.arms)]
    for text in scripts:
        done = subprocess.run(
            ["bash", "-n"], input=text, text=True, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "set -euo pipefail" in text and not re.search(r"@[A-Z]+@", text)
        assert text.startswith("#!/usr/bin/env bash\n") and "\t" not in text


def bare_expansions(line: str) -> list[str]:
    """What shellcheck calls SC2086: a variable outside of quotes falls apart at its spaces."""
    code = re.sub(r"'[^']*'", "''", line)  # nothing expands in single quotes
    code = re.sub(r"\(\(.*?\)\)|\[\[.*?\]\]|\$\(seq \d+\)|#.*", "", code)  # nor is this split
    code = re.sub(r'"\$\(([^()]*)\)"', r"\1", code)  # a command in quotes has quotes of its own
    outside = [part for position, part in enumerate(code.split('"')) if position % 2 == 0]
    return [part for part in outside if "$" in part]


@pytest.mark.parametrize("pack", [b300_pack(seed=1), cpu_pack(seed=1)], ids=["b300", "cpu"])
def test_no_expansion_stands_bare(pack: Pack) -> None:
    for text in (runner(pack), *(server_script(pack, arm) for arm in pack.arms)):
        for line in text.splitlines():
            assert bare_expansions(line) == [], line


@pytest.mark.parametrize("line", ["kill $server", 'cd "$(dirname $0)"', 'exec "$A" $B'])
def test_a_bare_expansion_is_seen(line: str) -> None:
    assert bare_expansions(line)


def test_a_command_line_comes_out_as_it_went_in() -> None:
    pack = b300_pack(seed=1)
    for arm in pack.arms:
        text = server_script(pack, arm).replace("\\\n", " ")
        (line,) = [line for line in text.splitlines() if line.startswith("exec ")]
        words = shlex.split(line)
        kept = list(arm.arguments)
        at = kept.index("--port")
        del kept[at : at + 2]
        assert words[:3] == ["exec", "$PROGRAM", "serve"]
        assert words[3:-2] == kept


def test_it_runs_every_cell_between_two_looks_at_the_counters(machine: Machine) -> None:
    pack = tiny_pack()
    folder = write_pack(pack, machine.folder / "a pack")
    done = machine.run(folder)
    assert done.returncode == 0, done.stderr
    calls = [shlex.split(line) for line in machine.calls.read_text().splitlines()]
    assert [call[call.index("--seed") + 1] for call in calls] == ["1", "2", "11", "12"]
    for cell in pack.cells:
        base = folder / "results" / cell.arm / cell.name
        looks = [base.with_name(f"{cell.name}.{when}.prom") for when in ("before", "after")]
        before, after = (float(path.read_text().split()[-1]) for path in looks)
        assert after == before + 1
        assert base.with_name(f"{cell.name}.json").read_text() == "{}"
    for arm in pack.arms:
        found = (folder / "results" / arm.name / "moe_backend.txt").read_text()
        assert found == "Using 'MARLIN' Mxfp4 MoE backend\n"
        # Its model is one word, whatever is in it.
        assert (
            "serve model dir --port" in (folder / "results" / arm.name / "server.log").read_text()
        )
    # Nothing is left running, and nothing is run twice.
    again = machine.run(folder)
    assert again.returncode == 0 and again.stdout.count("is there") == 2
    assert len(machine.calls.read_text().splitlines()) == 4


def test_a_run_that_was_cut_off_goes_on(machine: Machine) -> None:
    folder = write_pack(tiny_pack(), machine.folder / "pack")
    assert machine.run(folder, FAIL_SEED="2").returncode == 1
    assert not (folder / "results" / "v0.27.1" / "c2.json").exists()
    assert machine.run(folder).returncode == 0
    seeds = [re.search(r"--seed (\d+)", line)[1] for line in machine.calls.read_text().splitlines()]
    assert seeds == ["1", "2", "2", "11", "12"]


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (("fail",), {}, "out of memory"),
        ((), {"VLLM_COMMAND_0_27_1": "@0.30.0"}, "expected vLLM 0.27.1, got v0.30.0"),
        ((), {"K3LAB": "/nowhere/k3lab"}, "there is no /nowhere/k3lab"),
    ],
)
def test_it_says_why_it_stops(
    machine: Machine, words: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    folder = write_pack(tiny_pack(*words), machine.folder / "pack")
    given = {
        name: machine.environment["VLLM_COMMAND_0_30_0"] if value == "@0.30.0" else value
        for name, value in variables.items()
    }
    done = machine.run(folder, **given)
    assert done.returncode == 1
    assert message in done.stderr


def test_a_port_in_use_is_not_measured(machine: Machine) -> None:
    """Else another server would be measured in place of the one that could not start."""
    folder = write_pack(tiny_pack(), machine.folder / "pack")
    program, port = (machine.environment[name] for name in ("VLLM_COMMAND_0_30_0", "PORT"))
    other = subprocess.Popen([program, "serve", "--port", port], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline()
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                    break
        done = machine.run(folder)
    finally:
        other.kill()
        other.communicate()
    assert done.returncode == 1
    assert "something answers at" in done.stderr


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="is there already"):
        write_pack(tiny_pack(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert json.loads((write_pack(tiny_pack(), tmp_path / "new") / "pack.json").read_text())
