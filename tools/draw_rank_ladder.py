"""Draw the README's picture of the rank ladder: first rung, September's, the floor, the published.

    .venv/bin/python tools/draw_rank_ladder.py            # writes docs/images/rank-ladder.svg
    .venv/bin/python tools/draw_rank_ladder.py --check    # exit 1 if the picture is out of date

Reads ``data/results/h200/ladder.json`` and the published points. The same content gives the same
bytes: a test draws it again and compares.
"""

from __future__ import annotations

import argparse
import os
from html import escape
from pathlib import Path

from kimik3_lab.performance.published import compare, load_points
from kimik3_lab.teaching.rank_record import FIRST, SEPTEMBER, RankRecord

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "rank-ladder.svg"
WIDTH, HEIGHT = 960, 430
#: Where the bars begin, where the floor is, and where the two columns of gains stand.
LEFT, FLOOR, HERE, THERE = 112, 600, 722, 872
TOP, GROUP, BAR = 118, 78, 27
INK, SOFT, OLD, NEW, LINE = "#222222", "#5A5A5A", "#A9C9E0", "#0072B2", "#B85000"


def text(x: float, y: float, words: str, **style: object) -> str:
    """Return a line of text; keywords are attributes, ``_`` standing for ``-``."""
    given = {"fill": INK, "font_size": 15, **style}
    shown = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in given.items())
    return f'<text x="{x:g}" y="{y:g}"{shown}>{escape(words)}</text>'


def bar(y: float, rates: list[float], floor: float, color: str, name: str, ink: str) -> list[str]:
    """Return a bar as long as its share of the floor, with its rate in it.

    If there are two rates, the second run's is marked, and stands to the right.
    """
    end, *others = (LEFT + rate / floor * (FLOOR - LEFT) for rate in rates)
    parts = [
        f'<rect x="{LEFT}" y="{y:g}" width="{end - LEFT:.1f}" height="{BAR}" fill="{color}"/>',
        text(LEFT + 8, y + 19, f"{name} {rates[0]:,.0f}", fill=ink, font_size=14),
    ]
    for rate, other in zip(rates[1:], others, strict=True):
        words = f"again {rate:,.0f}"
        parts += [
            f'<path d="M{end:.1f} {y + BAR / 2:g}H{other:.1f}M{other:.1f} {y + 4:g}v{BAR - 8}" '
            f'stroke="{INK}" stroke-width="2.5" fill="none"/>',
            text(round(max(end, other) + 8, 1), y + 19, words, fill=SOFT, font_size=13),
        ]
    return parts


def group(record: RankRecord, concurrency: int, y: float, published: float) -> list[str]:
    """Return the drawing of one concurrency."""
    floor = record.floor_rate(concurrency)
    parts = [text(LEFT - 12, y + 33, f"{concurrency} at a time", text_anchor="end")]
    for place, (rung, color, ink, name) in enumerate(
        ((FIRST, OLD, INK, "first rung"), (SEPTEMBER, NEW, "white", "September"))
    ):
        runs = [record] if record.again is None else [record, record.again]
        rates = [run.need(rung, concurrency)["output_tokens_per_s"] for run in runs]
        parts += bar(y + place * BAR, rates, floor, color, name, ink)
    parts += [
        f'<line x1="{FLOOR}" y1="{y - 6}" x2="{FLOOR}" y2="{y + 2 * BAR + 6}" stroke="{LINE}" '
        'stroke-width="2.5" stroke-dasharray="5 4"/>',
        text(FLOOR + 8, y + 32, f"{floor:,.0f}", fill=LINE),
        text(HERE, y + 31, f"{record.gain(concurrency):.2f}x", text_anchor="middle", font_size=23,
             font_weight="bold", fill=NEW),
        text(THERE, y + 31, f"{published:.2f}x", text_anchor="middle", font_size=23,
             font_weight="bold", fill=SOFT),
    ]  # fmt: skip
    if record.again is not None:
        words = f"again {record.again.gain(concurrency):.2f}x"
        parts.append(text(HERE, y + 50, words, text_anchor="middle", font_size=14, fill=NEW))
    return parts


def picture(record: RankRecord, published: dict[int, float]) -> str:
    """Return the picture as SVG."""
    made, work = record.body["provenance"], record.body["workload"]
    below_title = (
        f"Miniature, Measured ({made['device']}, {made['date_utc'][:10]}): {work['layers']} of 93 "
        f"layers at full width, random weights, no collectives; {work['prompt_tokens']:,} tokens "
        f"in, {work['output_tokens']:,} out, {work['num_drafts']} drafts"
    )
    first = (
        "First rung: what vLLM 0.27.1 decides. September: what its main of 2026-09-13 decides and "
        "how it computes."
    )
    kernels = (
        "Kernels in both: this lab's, and PyTorch's matrix products. Published: vLLM's two "
        "versions, all of K3."
    )
    floor = (
        "Bars are shares of the floor, group by group. Floor: the September rung if every part of "
        "every step took only the time of its bytes or operations."
    )
    twice = (
        "Dark marks: the same ladder again, on a machine started anew. Counts are the same; what "
        "differs most is the first rung's steps with a piece of a prompt."
    )
    small = {"font_size": 13, "fill": SOFT}
    middle = {"text_anchor": "middle"}
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(20, 32, "One rank of Kimi K3 on one H200: output tokens a second", font_size=20,
             font_weight="bold"),
        text(20, 54, below_title, **small),
        text(FLOOR, 100, "floor", fill=LINE, **middle),
        text(HERE, 80, "gain here", fill=NEW, **middle),
        text(HERE, 98, "Miniature, Measured", **small, **middle),
        text(THERE, 80, "gain on 8 B300", **middle),
        text(THERE, 98, "Published", **small, **middle),
    ]  # fmt: skip
    for place, concurrency in enumerate(sorted(published)):
        parts += group(record, concurrency, TOP + place * GROUP, published[concurrency])
    below = TOP + len(published) * GROUP + 14
    notes = [first, kernels, floor] + ([] if record.again is None else [twice])
    parts += [text(20, below + 19 * place, words, **small) for place, words in enumerate(notes)]
    title = "Throughput of one rank of Kimi K3 on one H200, beside its floor and the published gain"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n'
        f"<title>{title}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def current() -> str:
    """Return the picture of the files as they are."""
    published = {c.concurrency: c.throughput_ratio for c in compare(load_points())}
    return picture(RankRecord.read(), published)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare with what is there")
    drawn = current()
    if parser.parse_args().check:
        same = OUTPUT.is_file() and OUTPUT.read_text(encoding="utf-8") == drawn
        print(f"{OUTPUT.name} is {'up to date' if same else 'out of date: run without --check'}")
        return 0 if same else 1
    part = OUTPUT.with_suffix(".svg.part")
    part.write_text(drawn, encoding="utf-8")
    os.replace(part, OUTPUT)
    print(f"{len(drawn):,} bytes, {OUTPUT.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
