"""Write a pack's folder: a script for each server, one that runs everything, and a page to read.

Needs the standard library. Whoever has the machine needs bash, curl, ``k3lab`` and the releases of
vLLM; nothing of the lab runs inside of the servers.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path

from kimik3_lab.reproduce.pack import PACK_FILE, Arm, Cell, Pack, PackError

__all__ = ["runner", "server_script", "variable", "write_pack"]

_RUNNER_HEAD = r"""#!/usr/bin/env bash
# Runs every cell of this pack and leaves what came out in results/. Written by `k3lab reproduce`.
# A cell that has its result is passed over, so that a run that was cut off can go on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

K3LAB="${K3LAB:-k3lab}"
PORT="${PORT:-@PORT@}"
READY_SECONDS="${READY_SECONDS:-3600}"
URL="http://127.0.0.1:${PORT}"
export PORT
server=""

fail() {
  printf 'run.sh: %s\n' "$*" >&2
  exit 1
}

fetch() {
  curl --fail --silent --show-error --noproxy '*' --max-time 30 "$@"
}

stop_server() {
  [[ -n "$server" ]] || return 0
  # The server, its engine and its workers are one group.
  kill -TERM -- "-$server" 2>/dev/null || true
  for _ in $(seq 60); do
    kill -0 -- "-$server" 2>/dev/null || break
    sleep 1
  done
  kill -KILL -- "-$server" 2>/dev/null || true
  wait "$server" 2>/dev/null || true
  server=""
}
trap stop_server EXIT
trap 'exit 130' INT TERM

start_server() {
  local arm="$1" began="$SECONDS"
  if fetch "$URL/health" >/dev/null 2>&1; then
    fail "something answers at $URL already: stop it, or set PORT to a free one"
  fi
  mkdir -p "results/$arm"
  printf '== %s: starting\n' "$arm"
  setsid bash "servers/$arm.sh" >"results/$arm/server.log" 2>&1 &
  server="$!"
  until fetch "$URL/health" >/dev/null 2>&1; do
    if ! kill -0 "$server" 2>/dev/null; then
      tail -n 20 "results/$arm/server.log" >&2
      fail "$arm ended before it was ready; the whole log is results/$arm/server.log"
    fi
    if ((SECONDS - began > READY_SECONDS)); then
      fail "$arm was not ready after $READY_SECONDS s; set READY_SECONDS to wait longer"
    fi
    sleep 1
  done
  printf '== %s: ready after %d s\n' "$arm" "$((SECONDS - began))"
}

# Which kernels compute the experts: the published comparison does not say.
note_backend() {
  local arm="$1"
  grep -ohE "Using .*MoE backend" "results/$arm/server.log" | sort -u \
    >"results/$arm/moe_backend.txt" || true
}

has_result() {
  [[ -s "results/$1/$2.json" ]]
}

# Counters stand before and after each cell: their difference is the cell's.
cell() {
  local arm="$1" name="$2" base="results/$1/$2"
  shift 2
  if [[ -s "$base.json" ]]; then
    printf '   %s %s: is there\n' "$arm" "$name"
    return 0
  fi
  printf '   %s %s\n' "$arm" "$name"
  fetch "$URL/metrics" >"$base.before.prom"
  "$K3LAB" bench --base-url "$URL" --force --output "$base.part.json" "$@" >"$base.txt"
  fetch "$URL/metrics" >"$base.after.prom"
  mv "$base.part.json" "$base.json"
}

command -v "$K3LAB" >/dev/null || fail "there is no $K3LAB: install the lab, or set K3LAB to it"
command -v curl >/dev/null || fail "there is no curl: install it"
"""

_SERVER = r"""#!/usr/bin/env bash
# @WHAT@. Written by `k3lab reproduce`.
set -euo pipefail
@EXPORTS@PROGRAM="${@VARIABLE@:-@DEFAULT@}"
@CHECK@exec "$PROGRAM" serve \
  @WORDS@ \
  --port "${PORT:-@PORT@}"
"""

_CHECK = r"""found="$("$PROGRAM" --version | tail -n 1)"
if [[ "${ANY_VERSION:-}" != 1 && "$found" != *"@VERSION@"* ]]; then
  printf 'expected vLLM %s, got %s: set @VARIABLE@ to its command, or ANY_VERSION=1\n' \
    "@VERSION@" "$found" >&2
  exit 1
fi
"""


def variable(arm: Arm) -> str:
    """Name of the variable that holds the program of a server.

    Examples
    --------
    >>> variable(Arm(name="a", version="0.27.1", drafts=0, arguments=("m",)))
    'VLLM_COMMAND_0_27_1'
    """
    return "K3LAB" if arm.server == "k3lab" else f"VLLM_COMMAND_{arm.version.replace('.', '_')}"


def server_script(pack: Pack, arm: Arm) -> str:
    """Return the script that becomes one server."""
    check = _CHECK if arm.server == "vllm" else ""
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in arm.environment.items()
    )
    values = {
        "WHAT": f"{arm.server} {arm.version}, {arm.drafts} draft tokens a step",
        "EXPORTS": exports,
        "CHECK": check,
        "VARIABLE": variable(arm),
        "DEFAULT": arm.server,
        "VERSION": arm.version,
        "WORDS": " \\\n  ".join(_lines(_without_port(arm.arguments))),
        "PORT": str(pack.port),
    }
    return _filled(_SERVER, values)


def _filled(text: str, values: dict[str, str]) -> str:
    # Twice, because the check has places of its own.
    for _ in range(2):
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
    return text


def _without_port(words: tuple[str, ...]) -> list[str]:
    """Leave out the port, which the runner sets."""
    kept = list(words)
    if "--port" in kept:
        at = kept.index("--port")
        del kept[at : at + 2]
    return kept


def _lines(words: list[str]) -> list[str]:
    """One option a line, with its value."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines or " " in lines[-1]:
            lines.append(shlex.quote(word))
        elif lines[-1].startswith("--"):
            lines[-1] += " " + shlex.quote(word)
        else:
            lines.append(shlex.quote(word))
    return lines


def runner(pack: Pack) -> str:
    """Return the script that runs all cells."""
    parts = [_RUNNER_HEAD.replace("@PORT@", str(pack.port))]
    for arm in pack.arms:
        cells = pack.cells_of(arm)
        done = " && ".join(f"has_result {arm.name} {cell.name}" for cell in cells)
        parts.append(
            f"\nif {done}; then\n  printf '== %s: is there\\n' {arm.name}\nelse\n"
            f"  start_server {arm.name}\n  note_backend {arm.name}"
        )
        parts += [f"  cell {arm.name} {cell.name} {_client(pack, cell)}" for cell in cells]
        # Some backends are chosen, and named, by the first request only.
        parts.append(f"  note_backend {arm.name}\n  stop_server\nfi")
    parts.append("\nprintf 'All cells are there. Now: %s reproduce report .\\n' \"$K3LAB\"\n")
    return "\n".join(parts)


def _client(pack: Pack, cell: Cell) -> str:
    words = [
        "--concurrency", cell.concurrency, "--num-requests", cell.num_requests,
        "--prompt-tokens", cell.prompt_tokens, "--output-tokens", cell.output_tokens,
        "--warmup-requests", cell.warmup_requests, "--seed", cell.seed, "--device", pack.device,
        "--timeout", 3600,
    ]  # fmt: skip
    if pack.model is not None:
        words += ["--model", pack.model]
    if pack.tokenizer is not None:
        words += ["--tokenizer", pack.tokenizer]
    if pack.temperature is None:
        words += ["--extra-body", '{"temperature": null}']
    else:
        words += ["--temperature", pack.temperature]
    return shlex.join(map(str, words))


def _page(pack: Pack) -> str:
    lines = [
        f"# {pack.what}", "",
        "Written by `k3lab reproduce`. `pack.json` says what runs; the scripts follow from it.", "",
        "1. Install the lab here, and each release of vLLM in an environment of its own.",
        "2. Name their commands:", "",
        *(f"   export {name}=/path/to/{server}" for name, server in _programs(pack)), "",
        "3. `./run.sh` starts one server after the other and runs its cells. It can be cut off and "
        "started again.",
        "4. `k3lab reproduce report .` makes the table, and says which cells must not be quoted.",
        "",
        "| server | draft tokens | cells |", "|---|---|---|",
        *(
            f"| {arm.name} | {arm.drafts} | {', '.join(c.name for c in pack.cells_of(arm))} |"
            for arm in pack.arms
        ), "",
    ]  # fmt: skip
    if pack.pins:
        lines += [
            "Defaults that moved between the releases, and what both get here:", "",
            "| default | before | after | here |", "|---|---|---|---|",
            *(f"| `{p.name}` | {p.before} | {p.after} | {p.pinned} |" for p in pack.pins), "",
        ]  # fmt: skip
    if pack.not_pinned:
        lines += [
            "Options that only the later release has and that do something by default, so that "
            f"nothing can be pinned: {', '.join(f'`{name}`' for name in pack.not_pinned)}.", "",
        ]  # fmt: skip
    return "\n".join(lines)


def _programs(pack: Pack) -> list[tuple[str, str]]:
    return list(dict.fromkeys((variable(arm), arm.server) for arm in pack.arms))


def write_pack(pack: Pack, folder: Path) -> Path:
    """Write the folder; it appears whole or not at all.

    Raises
    ------
    PackError
        If ``folder`` exists: results of another pack could be in it.
    """
    if folder.exists():
        raise PackError(f"{folder} is there already: choose another name, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        (scratch / "servers").mkdir()
        files = {PACK_FILE: pack.dump(), "README.md": _page(pack), "run.sh": runner(pack)}
        files |= {f"servers/{arm.name}.sh": server_script(pack, arm) for arm in pack.arms}
        for name, text in files.items():
            path = scratch / name
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
        scratch.chmod(0o755)
        os.replace(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return folder
