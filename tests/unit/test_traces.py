"""Loaders of public trace formats: what they read, what they refuse, and loaders that are wrong."""

from __future__ import annotations

import gzip
import importlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_lab.benchmark import trace_sharegpt, traces
from kimik3_lab.benchmark.traces import (
    TraceError,
    TraceFile,
    TraceRequest,
    cut_window,
    poisson_arrivals,
    read_trace,
    scale_rate,
    thin_sessions,
    write_trace,
)

MOONCAKE = (
    '{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
    "\n"
    '{"timestamp": 30535, "input_length": 512, "output_length": 26, "hash_ids": [46]}\n'
)
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2024-05-10 23:59:59.500000+00:00,2162,5\r\n"
    "2024-05-11 00:00:00.009930+00:00,2399,6\r\n"
)
BURSTGPT_1 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,1087,230,1317,Conversation log\n"
)
BURSTGPT_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
    "19440161.5,,2,ChatGPT,36,29,65,API log\n"
)
#: Text of each file, and what is in it, written down by hand.
FILES: dict[str, tuple[str, list[TraceRequest]]] = {
    "mooncake": (
        MOONCAKE,
        [TraceRequest(0.0, 1100, 52, (46, 47, 48)), TraceRequest(3.053, 512, 26, (46,))],
    ),
    "azure 2023": (AZURE_2023, [TraceRequest(0.0, 4808, 10), TraceRequest(0.052, 3180, 8)]),
    "azure 2024": (AZURE_2024, [TraceRequest(0.0, 2162, 5), TraceRequest(0.50993, 2399, 6)]),
    "burstgpt 1": (BURSTGPT_1, [TraceRequest(0.0, 472, 18), TraceRequest(40.0, 1087, 230)]),
    "burstgpt 2": (
        BURSTGPT_2,
        [TraceRequest(0.0, 906, 446, session="1722ac82"), TraceRequest(51.5, 36, 29)],
    ),
}
TALK = {
    "id": "abc",
    "conversations": [
        {"from": "gpt", "value": "w" * 80},  # nobody has asked yet: context of what follows
        {"from": "human", "value": "x" * 3_920},
        {"from": "gpt", "value": "y" * 400},
        {"from": "human", "value": "z" * 1_600},
        {"from": "gpt", "value": "v" * 4},
        {"from": "gpt", "value": ""},
    ],
}


def write(folder: Path, text: str, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def close(found: list[TraceRequest], wanted: list[TraceRequest]) -> bool:
    """Equal but for times, which may differ by a microsecond."""
    return len(found) == len(wanted) and all(
        replace(a, timestamp=0) == replace(b, timestamp=0)
        and abs(a.timestamp - b.timestamp) < 1.5e-6
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("packed", [False, True])
def test_formats_are_recognised_and_read(tmp_path: Path, name: str, packed: bool) -> None:
    text, wanted = FILES[name]
    path = write(tmp_path, text)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    trace = read_trace(path)
    assert trace.format == name.split()[0]
    assert close(list(trace), wanted)
    assert close(list(trace), wanted)  # and once more
    assert trace.bad_rows == 0


def test_a_byte_order_mark_and_further_columns_do_no_harm(tmp_path: Path) -> None:
    text = "\ufeffTIMESTAMP,NumImages,GeneratedTokens,ContextTokens\n2024-10-15 00:00,2,120,900\n"
    assert list(read_trace(write(tmp_path, text))) == [TraceRequest(0.0, 900, 120)]


def test_hash_ids_may_be_of_full_blocks_only_or_of_another_size(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2]}
    path = write(tmp_path, json.dumps(row))
    assert next(iter(read_trace(path))).hash_ids == (1, 2)
    row["hash_ids"] = list(range(69))
    path = write(tmp_path, json.dumps(row))
    with pytest.raises(TraceError, match="69 hash_ids for 1,100 input tokens, expected 3"):
        list(read_trace(path))
    assert len(next(iter(read_trace(path, block_tokens=16))).hash_ids) == 69


# -- ShareGPT --------------------------------------------------------------------------------------


def test_sharegpt_turns_share_the_blocks_before_them(tmp_path: Path) -> None:
    other = {**TALK, "id": "def"}
    path = write(tmp_path, json.dumps([TALK, other]))
    first, second, third, _fourth = read_trace(path)
    # 80 and 3,920 characters are 20 and 980 tokens; then 100 of the answer and 400 asked.
    assert (first.input_tokens, first.output_tokens, first.session) == (1000, 100, "abc")
    assert (second.input_tokens, second.output_tokens) == (1500, 1)
    assert len(first.hash_ids) == 2
    assert len(second.hash_ids) == 3
    # The second block of the first prompt was not full: it has become another one.
    assert first.hash_ids[0] == second.hash_ids[0]
    assert not set(first.hash_ids[1:]) & set(second.hash_ids[1:])
    assert third.session == "def"
    assert not {*first.hash_ids, *second.hash_ids} & set(third.hash_ids)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("lines", [False, True])
def test_sharegpt_in_chunks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, lines: bool
) -> None:
    text = "\n".join([json.dumps(TALK)] * 3) if lines else json.dumps([TALK] * 3, indent=1)
    path = write(tmp_path, text)
    whole = list(read_trace(path))
    monkeypatch.setattr(trace_sharegpt, "_CHUNK", chunk)
    assert list(read_trace(path)) == whole
    assert len(whole) == 6


def test_sharegpt_is_read_without_holding_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_sharegpt, "_CHUNK", 1000)
    file = io.StringIO(json.dumps([TALK] * 50))
    rows = trace_sharegpt.sharegpt_rows(file, 512, len)
    next(rows)
    assert file.tell() < 0.4 * len(file.getvalue())


def test_sharegpt_with_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    turns = [{"from": "user", "value": "a b c"}, {"from": "assistant", "value": "d e"}]
    path = write(tmp_path, json.dumps([{"conversations": turns}]))
    (request,) = read_trace(path, tokenizer=tmp_path)
    assert (request.input_tokens, request.output_tokens) == (3, 2)
    with pytest.raises(TraceError, match="no tokenizer at"):
        list(read_trace(path, tokenizer=tmp_path / "nowhere"))


# -- bad rows --------------------------------------------------------------------------------------

GOOD_ROW = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
BAD_MOONCAKE = {
    "{": "no JSON",
    "[1]": "expected a JSON object, got list",
    '{"timestamp": 1, "input_length": 5}': "output_length missing",
    GOOD_ROW.replace("600", "0"): "input_length must be a whole number of at least 1, got 0",
    GOOD_ROW.replace("600", "true"): "got True",
    GOOD_ROW.replace("600", "600.5"): "got 600.5",
    GOOD_ROW.replace(": 5", ": -5"): "output_length must be",
    GOOD_ROW.replace(": 0", ": -1"): "timestamp .* at least 0, got -1",
    GOOD_ROW.replace(": 0", ": NaN"): "got nan",
    GOOD_ROW.replace("[1, 2]", "[1]"): None,  # full blocks only
    GOOD_ROW.replace("[1, 2]", "[1, 2, 3]"): "3 hash_ids for 600 input tokens, expected 2",
    GOOD_ROW.replace("[1, 2]", "[1, null]"): "whole numbers, got None",
    GOOD_ROW.replace("[1, 2]", "7"): "must be a list of whole numbers, got int",
}


@pytest.mark.parametrize("row", BAD_MOONCAKE)
def test_a_bad_row_is_named_and_explained(tmp_path: Path, row: str) -> None:
    path = write(tmp_path, GOOD_ROW + "\n" + row.strip() + "\n" + GOOD_ROW)
    message = BAD_MOONCAKE[row]
    if message is None:
        assert len(list(read_trace(path))) == 3
        return
    with pytest.raises(TraceError, match=rf"trace\.txt, line 3: .*{message}"):
        list(read_trace(path))
    lenient = read_trace(path, skip_bad_rows=True)
    assert len(list(lenient)) == 2
    assert lenient.bad_rows == 1
    assert "line 3" in lenient.first_bad_rows[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE_2023 + "yesterday,1,1\n", r"line 4: TIMESTAMP must be a time such as .*'yesterday'"),
        (AZURE_2023 + "2023-11-16 18:17:05,1\n", "line 4: 2 fields, expected 3"),
        (AZURE_2023 + "2023-11-16 18:17:05,x,1\n", "line 4: ContextTokens .* got 'x'"),
        (AZURE_2023 + "2023-11-16 18:00:00,5,1\n", "line 4: arrives 1024.03 s before the row"),
        (BURSTGPT_1 + "50,ChatGPT,9,0,9,API log\n", "line 4: Response tokens .* that failed"),
        (BURSTGPT_1 + "-1,ChatGPT,9,3,9,API log\n", "line 4: Timestamp must be .* got '-1'"),
        (json.dumps([TALK, 5]), "conversation 2: expected a JSON object, got int"),
        (json.dumps([TALK, {"a": 1}]), "conversation 2: .*no such field"),
        (json.dumps([TALK, {"conversations": [{"from": "human"}]}]), "conversation 2: a turn must"),
        (json.dumps([TALK, {"conversations": TALK["conversations"][:2]}]), "nothing to ask"),
        (json.dumps([TALK, TALK])[:-900], "conversation 2: no JSON .* is the file whole"),
        (json.dumps([TALK])[:-1], "conversation 2: the array has no end"),
    ],
)
def test_bad_rows_of_the_other_formats(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError, match=message):
        list(read_trace(path))
    lenient = read_trace(path, skip_bad_rows=True)
    assert len(list(lenient)) == 2
    assert lenient.bad_rows == 1


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace at"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match=r"begins 'a,b'.*name one with format"):
        read_trace(write(tmp_path, "a,b\n1,2\n"))
    with pytest.raises(TraceError, match="line 1: no column TIMESTAMP and ContextTokens"):
        list(read_trace(write(tmp_path, "GeneratedTokens\n1\n"), "azure"))
    with pytest.raises(TraceError, match="format must be one of mooncake"):
        read_trace(write(tmp_path, "x"), "csv")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=r"holds no request$"):
        list(read_trace(write(tmp_path, BURSTGPT_1.split("\n")[0] + "\n")))
    with pytest.raises(TraceError, match=r"no request: all 1 rows are bad, the first: .*line"):
        list(read_trace(write(tmp_path, "{}\n"), "mooncake", skip_bad_rows=True))
    packed = tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress(GOOD_ROW.encode() * 500)[:-30])
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_trace(packed))
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"\xff\xfe{")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(latin)


def test_skipping_one_row_out_of_order_keeps_the_rest(tmp_path: Path) -> None:
    text = "".join(GOOD_ROW.replace(": 0", f": {t}") for t in (5000, 7000, 6000, 8000))
    path = write(tmp_path, text)
    assert [r.timestamp for r in read_trace(path, skip_bad_rows=True)] == [0, 2, 3]
    assert [r.timestamp for r in read_trace(path, in_order=False)] == [0, 2, 1, 3]


# -- wrong loaders ---------------------------------------------------------------------------------


#: Module, what stands there, and the mistake that takes its place.
MUTANTS = [
    ("trace_mooncake", "/ 1e3,", ","),
    ("trace_mooncake", "/ 1e3,", "// 1e3,"),
    ("trace_mooncake", 'row["output_length"]', 'row["input_length"]'),
    ("trace_mooncake", "return tuple(ids)", "return tuple(ids[1:])"),
    ("trace_mooncake", "return tuple(ids)", "return tuple(sorted(ids, reverse=True))"),
    ("trace_mooncake", "if line.strip():", "if number > 1:"),
    ("trace_csv", "moment.timestamp(),", "moment.replace(microsecond=0).timestamp(),"),
    ("trace_csv", "moment.timestamp(),", "moment.second + moment.microsecond / 1e6,"),
    ("trace_csv", "fields[given],", "fields[1],"),
    ("trace_csv", "fields[answered],", "fields[-2],"),
    ("trace_csv", "session=session or None", "session=session"),
    ("trace_csv", 'session="Session ID"', 'session="Model"'),
]


@pytest.mark.parametrize(("name", "right", "wrong"), MUTANTS)
def test_wrong_loaders_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, right: str, wrong: str
) -> None:
    module = importlib.import_module(f"kimik3_lab.benchmark.{name}")
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1
    broken: dict[str, Any] = {"__name__": name}
    exec(compile(source.replace(right, wrong), name, "exec"), broken)
    for reader in ("mooncake_rows", "azure_rows", "burstgpt_rows"):
        if reader in broken:
            monkeypatch.setattr(traces, reader, broken[reader])

    def right_about(text: str, wanted: list[TraceRequest]) -> bool:
        try:
            return close(list(read_trace(write(tmp_path, text))), wanted)
        except (TraceError, broken["BadRow"]):
            return False

    assert not all(right_about(*case) for case in FILES.values())


# -- round trip ------------------------------------------------------------------------------------


@st.composite
def any_trace(draw: st.DrawFn, *, named: bool) -> list[TraceRequest]:
    times = sorted(draw(st.lists(st.integers(0, 10**12), min_size=1, max_size=20)))
    requests = []
    for microseconds in times:
        tokens = draw(st.integers(1, 5_000))
        blocks = -(-tokens // 512)
        names = draw(st.lists(st.integers(0, 2**40), min_size=blocks, max_size=blocks))
        session = draw(st.none() | st.text("abc 7/", min_size=1)) if named else None
        requests.append(
            TraceRequest(
                (microseconds - times[0]) / 1e6,
                tokens,
                draw(st.integers(1, 10**6)),
                tuple(names) if named else None,
                session,
            )
        )
    return requests


@settings(max_examples=40, deadline=None)
@given(any_trace(named=True), st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
def test_what_is_written_is_read_again(tmp_path_factory, requests, name) -> None:
    path = tmp_path_factory.mktemp("round") / name
    assert write_trace(requests, path) == len(requests)
    assert close(list(read_trace(path)), requests)
    assert [p.name for p in path.parent.iterdir()] == [name]


@settings(max_examples=40, deadline=None)
@given(any_trace(named=False))
def test_csv_round_trip(tmp_path_factory, requests) -> None:
    from datetime import UTC, datetime, timedelta

    folder = tmp_path_factory.mktemp("csv")
    start = datetime(2024, 5, 10, tzinfo=UTC)
    rows = [
        f"{start + timedelta(seconds=r.timestamp)},{r.input_tokens},{r.output_tokens}\n"
        for r in requests
    ]
    azure = write(folder, AZURE_2024.split("\r")[0] + "\n" + "".join(rows))
    assert close(list(read_trace(azure)), requests)
    rows = [
        f"{r.timestamp:.6f},m,{r.input_tokens},{r.output_tokens},{0},API log\n" for r in requests
    ]
    burst = write(folder, BURSTGPT_1.split("\n")[0] + "\n" + "".join(rows))
    assert close(list(read_trace(burst)), requests)


def test_writing_fails_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> Iterator[TraceRequest]:
        yield TraceRequest(0.0, 1, 1)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_trace(broken(), tmp_path / "t.jsonl")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TraceError, match="make it first"):
        write_trace([], tmp_path / "no" / "t.jsonl")


# -- changing a trace ------------------------------------------------------------------------------


def test_scale_cut_and_thin() -> None:
    trace = [TraceRequest(float(t), 1, 1, session=f"s{t % 50}") for t in range(1000)]
    half = list(scale_rate(trace, 0.5))
    assert [r.timestamp for r in half[:3]] == [0.0, 2.0, 4.0]
    inside = list(cut_window(trace, 10, 20))
    assert [r.timestamp for r in inside] == [float(t) for t in range(10)]
    assert inside[0].session == "s10"
    some = list(thin_sessions(trace, 0.4, seed=3))
    kept = {r.session for r in some}
    assert some == [r for r in trace if r.session in kept]
    assert 8 <= len(kept) <= 32
    assert some == list(thin_sessions(trace, 0.4, seed=3))
    assert list(thin_sessions(trace, 1.0)) == trace
    for wrong in (lambda: scale_rate(trace, 0), lambda: cut_window(trace, 5, 5),
                  lambda: next(thin_sessions(trace, 0)),
                  lambda: next(poisson_arrivals(trace, 0))):  # fmt: skip
        with pytest.raises(TraceError, match="got"):
            wrong()


def test_a_window_stops_reading_behind_its_end() -> None:
    def endless() -> Iterator[TraceRequest]:
        moment = 0.0
        while True:
            yield TraceRequest(moment, 1, 1)
            moment += 1.0

    assert len(list(cut_window(endless(), 5.0, 8.0))) == 3


def test_arrivals_for_requests_without_times(tmp_path: Path) -> None:
    talks = [{**TALK, "id": f"t{i}"} for i in range(2000)]
    trace = read_trace(write(tmp_path, json.dumps(talks)))
    timed = list(poisson_arrivals(trace, 2.0, think_time=5.0, seed=1))
    assert len(timed) == 4000
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(timed))
    first: dict[str | None, TraceRequest] = {}
    gaps = []
    for request in timed:
        if request.session in first:
            assert request.input_tokens == 1500  # the second turn comes second
            gaps.append(request.timestamp - first[request.session].timestamp)
        else:
            first[request.session] = request
    starts = [r.timestamp for r in first.values()]
    assert 900 < starts[-1] < 1100  # 2,000 sessions at 2 a second
    assert 4.4 < sum(gaps) / len(gaps) < 5.6
    assert timed == list(poisson_arrivals(trace, 2.0, think_time=5.0, seed=1))
    assert isinstance(trace, TraceFile)
