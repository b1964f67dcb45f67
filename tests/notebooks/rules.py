"""What every notebook of the course keeps to: traps that running a notebook does not show.

A rule takes a :class:`Notebook` and returns what is wrong, one sentence a fault. The test beside
this file holds every notebook to every rule, and each rule to a notebook that breaks it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from nbformat.validator import iter_validate

__all__ = ["RULES", "Notebook", "Rule", "faults"]

MAX_BYTES = 500_000
MAX_LINES = 40
#: Written exactly so: nbval ignores a tag in capitals, and any tag that it does not know.
TAGS = {
    "parameters", "exercise", "solution", "instructor", "gpu", "slow", "raises-exception",
    "nbval-check-output", "nbval-ignore-output", "nbval-skip", "nbval-raises-exception",
}  # fmt: skip
#: The parts of a lesson in their order; "Exercise" may come several times, numbered from 1.
SKELETON = (
    "Setup", "Predict", "Idea", "Reference", "Build", "Check", "Exercise", "Measure",
    "Explain the gap", "When it breaks", "What you can now say",
)  # fmt: skip
REQUIRED = ("Setup", "Predict", "Idea", "Check", "Explain the gap", "What you can now say")
MACHINE_PATH = re.compile(
    r"(?<![\w.~-])(?:/(?:home|root|Users|tmp|var|work|workspace|mnt|opt|private|srv)/[\w.-]"
    r"|[A-Za-z]:\\+Users\\)|site-packages|\.venv/"
)


@dataclass(frozen=True)
class Notebook:
    """A notebook file, read as plain JSON so that nothing is repaired on the way."""

    path: Path

    @cached_property
    def json(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    @property
    def cells(self) -> list[dict[str, Any]]:
        return self.json["cells"]  # type: ignore[no-any-return]

    def of_type(self, kind: str) -> Iterator[tuple[int, dict[str, Any], str]]:
        """Yield position, cell and source text of the cells of one type."""
        for number, cell in enumerate(self.cells, 1):
            if cell["cell_type"] == kind:
                yield number, cell, "".join(cell["source"])

    @property
    def is_lesson(self) -> bool:
        return re.fullmatch(r"\d\d_\w+\.ipynb", self.path.name) is not None

    @cached_property
    def headings(self) -> list[tuple[int, int, str]]:
        """Cell position, level and text of every heading outside code blocks."""
        found = []
        for number, _, text in self.of_type("markdown"):
            for line in _without_code(text).splitlines():
                if match := re.match(r"(#{1,6})\s+(.+?)\s*#*$", line):
                    found.append((number, len(match[1]), match[2]))
        return found


def _without_code(text: str) -> str:
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def _tags(cell: dict[str, Any]) -> set[str]:
    return set(cell["metadata"].get("tags", ()))


def _outputs(notebook: Notebook) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    for number, cell, _ in notebook.of_type("code"):
        for output in cell["outputs"]:
            yield number, cell, output


def is_valid_nbformat_4_5(notebook: Notebook) -> list[str]:
    found = [notebook.json.get("nbformat"), notebook.json.get("nbformat_minor")]
    if found != [4, 5]:
        return [f"format {found}, expected [4, 5]"]
    # Only looks: nbformat.validate would mend a missing id without a word.
    for error in iter_validate(notebook.json):
        return [f"not a valid notebook: {error.message}"]
    ids = [cell["id"] for cell in notebook.cells]
    return [f"cell id {name} is used twice" for name in sorted(set(ids)) if ids.count(name) > 1]


def names_the_python3_kernel(notebook: Notebook) -> list[str]:
    name = notebook.json["metadata"].get("kernelspec", {}).get("name")
    return [] if name == "python3" else [f"kernelspec {name!r}, expected 'python3'"]


def uses_known_tags(notebook: Notebook) -> list[str]:
    wrong = [
        f"cell {number}: unknown tag {tag!r}"
        for number, cell in enumerate(notebook.cells, 1)
        for tag in sorted(_tags(cell) - TAGS)
    ]
    for number, _, text in notebook.of_type("code"):
        if re.search(r"#\s*(NBVAL|PYTEST_VALIDATE)_", text):
            wrong.append(f"cell {number}: an nbval comment; use a tag")
    return wrong


def promised_outputs_are_there(notebook: Notebook) -> list[str]:
    """Without a count or outputs nbval compares nothing, and passes."""
    return [
        f"cell {number}: promises its output but was not run"
        for number, cell, _ in notebook.of_type("code")
        if "nbval-check-output" in _tags(cell)
        and (cell["execution_count"] is None or not cell["outputs"])
    ]


def was_run_from_top_to_bottom(notebook: Notebook) -> list[str]:
    counts = [cell["execution_count"] for _, cell, text in notebook.of_type("code") if text.strip()]
    if counts == list(range(1, len(counts) + 1)):
        return []
    return [f"execution counts {counts}, expected 1 to {len(counts)}: restart and run all"]


def shows_no_errors(notebook: Notebook) -> list[str]:
    return [
        f"cell {number}: stored error {output['ename']}"
        for number, cell, output in _outputs(notebook)
        if output["output_type"] == "error" and "raises-exception" not in _tags(cell)
    ]


def stores_no_noise(notebook: Notebook) -> list[str]:
    """Widget states make GitHub call a notebook invalid; timings change with every run."""
    wrong = ["metadata.widgets is stored"] if "widgets" in notebook.json["metadata"] else []
    return wrong + [
        f"cell {number}: timings are stored"
        for number, cell in enumerate(notebook.cells, 1)
        if "execution" in cell["metadata"]
    ]


def images_are_files_with_alt_text(notebook: Notebook) -> list[str]:
    wrong = []
    for number, cell, text in notebook.of_type("markdown"):
        if "data:image/" in text or cell.get("attachments"):
            wrong.append(f"cell {number}: an image inside the text; make it a file")
        if re.search(r"!\[\s*\]\(", text) or re.search(r"<img(?![^>]*\balt=\"[^\"]+\")", text):
            wrong.append(f"cell {number}: an image without alt text")
    return wrong


def cells_are_short(notebook: Notebook) -> list[str]:
    lines = [len("".join(cell["source"]).splitlines()) for cell in notebook.cells]
    return [
        f"cell {number}: {count} lines, at most {MAX_LINES}"
        for number, count in enumerate(lines, 1)
        if count > MAX_LINES
    ]


def file_is_small(notebook: Notebook) -> list[str]:
    size = notebook.path.stat().st_size
    return [] if size < MAX_BYTES else [f"{size:,} bytes, at most {MAX_BYTES:,}"]


def has_a_title_and_a_claim(notebook: Notebook) -> list[str]:
    titles = [text for _, level, text in notebook.headings if level == 1]
    number = notebook.path.name[:2]
    wrong = []
    first = "".join(notebook.cells[0]["source"]).partition("\n")[0] if notebook.cells else ""
    if notebook.is_lesson and not re.fullmatch(rf"# {number} — \S.*", first):
        wrong.append(f"begins with {first!r}, expected '# {number} — Title'")
    if len(titles) != 1:
        wrong.append(f"{len(titles)} headings of the first level, expected 1")
    if notebook.is_lesson:
        before = []
        for cell in notebook.cells:
            text = "".join(cell["source"])
            if cell["cell_type"] != "markdown" or re.match(r"##\s", text):
                break
            before.append(text.partition("\n## ")[0])
        if not re.search(r"\*\*Claim\b", "\n".join(before)):
            wrong.append("no **Claim** between the title and the first section")
    return wrong


def sections_are_those_of_a_lesson(notebook: Notebook) -> list[str]:
    """Sections of the second level come from the skeleton, in its order; others go below them."""
    if not notebook.is_lesson:
        return []
    found, exercises, wrong = [], [], []
    for number, level, text in notebook.headings:
        if level != 2:
            continue
        name = next((s for s in SKELETON if re.match(rf"{s}(?!\w)", text)), None)
        if name is None:
            wrong.append(f"cell {number}: section {text!r} is not one of {', '.join(SKELETON)}")
            continue
        found.append(name)
        if name == "Exercise":
            exercises.append(text)
    order = [SKELETON.index(name) for name in found]
    if order != sorted(order):
        wrong.append(f"sections in the order {', '.join(found)}; expected {', '.join(SKELETON)}")
    twice = {name for name in found if found.count(name) > 1} - {"Exercise"}
    wrong += [f"section {name} comes twice" for name in sorted(twice)]
    wrong += [f"no section {name}" for name in REQUIRED if name not in found]
    for count, text in enumerate(exercises, 1):
        if not re.match(rf"Exercise {count}(?!\d)", text):
            wrong.append(f"{text!r} should be Exercise {count}")
    return wrong


def exercises_have_a_check_and_a_solution(notebook: Notebook) -> list[str]:
    wrong = []
    sections = [(n, text) for n, level, text in notebook.headings if level == 2]
    for index, (start, title) in enumerate(sections):
        if not title.startswith("Exercise"):
            continue
        end = sections[index + 1][0] if index + 1 < len(sections) else len(notebook.cells) + 1
        cells = notebook.cells[start - 1 : max(end - 1, start)]
        code = [c for c in cells if c["cell_type"] == "code"]
        if not any(re.search(r"\bcheck\w*\(", "".join(c["source"])) for c in code):
            wrong.append(f"{title}: no call of a check")
        solved = any("solution" in _tags(c) for c in cells)
        if not solved and not any("<details>" in "".join(c["source"]) for c in cells):
            wrong.append(f"{title}: no solution, neither a tagged cell nor <details>")
    return wrong


def code_leaves_the_environment_alone(notebook: Notebook) -> list[str]:
    forbidden = {
        r"^\s*[!%]\s*(uv\s+)?(pip|conda|mamba)\b": "installs packages",
        r"^%%capture": "hides output",
        r"\bsys\.path\b": "changes sys.path",
        r"\bFigureWidget\b": "uses FigureWidget",
        r"\bclear_output\(": "clears output, which nbval cannot follow",
    }
    return [
        f"cell {number}: {what}"
        for number, _, text in notebook.of_type("code")
        for pattern, what in forbidden.items()
        if re.search(pattern, text, flags=re.MULTILINE)
    ]


def relative_links_resolve(notebook: Notebook) -> list[str]:
    wrong = []
    for number, _, text in notebook.of_type("markdown"):
        plain = _without_code(text)
        targets = re.findall(r"\]\(\s*<?([^)\s>]+)", plain)
        targets += re.findall(r"^\s*\[[^\]]+\]:\s*(\S+)", plain, flags=re.MULTILINE)
        targets += re.findall(r"\b(?:href|src)=[\"']([^\"']+)", plain)
        for target in targets:
            if re.match(r"[a-z][a-z0-9+.-]*:|#|//", target, flags=re.IGNORECASE):
                continue
            file = unquote(target.partition("#")[0].partition("?")[0])
            if not (notebook.path.parent / file).exists():
                wrong.append(f"cell {number}: link to {target}, which is not there")
    return wrong


def outputs_name_no_machine_path(notebook: Notebook) -> list[str]:
    wrong = []
    for number, _, output in _outputs(notebook):
        kept = dict(output)
        if "data" in kept:
            kept["data"] = {k: v for k, v in kept["data"].items() if not k.startswith("image/")}
        if match := MACHINE_PATH.search(json.dumps(kept, ensure_ascii=False)):
            wrong.append(f"cell {number}: its output names a path of one machine: {match[0]}")
    return wrong


def outputs_hold_no_scripts(notebook: Notebook) -> list[str]:
    """A script in the output is megabytes of plotly, with a random identifier in every run."""
    return [
        f"cell {number}: its output holds {what}"
        for number, _, output in _outputs(notebook)
        for kind, value in output.get("data", {}).items()
        for what in _bulky(kind, "".join(value) if isinstance(value, list) else str(value))
    ]


def _bulky(kind: str, text: str) -> Iterator[str]:
    if kind == "text/html" and "<script" in text:
        yield "a script; draw with the plotly_mimetype renderer"
    if kind == "application/javascript":
        yield "JavaScript"
    if kind == "image/svg+xml":
        yield "SVG, which carries the date; use plotly"


#: What is wrong with a notebook, one sentence a fault.
Rule = Callable[[Notebook], list[str]]
#: Every rule, by name.
RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        is_valid_nbformat_4_5,
        names_the_python3_kernel,
        uses_known_tags,
        promised_outputs_are_there,
        was_run_from_top_to_bottom,
        shows_no_errors,
        stores_no_noise,
        images_are_files_with_alt_text,
        cells_are_short,
        file_is_small,
        has_a_title_and_a_claim,
        sections_are_those_of_a_lesson,
        exercises_have_a_check_and_a_solution,
        code_leaves_the_environment_alone,
        relative_links_resolve,
        outputs_name_no_machine_path,
        outputs_hold_no_scripts,
    )
}


def faults(path: Path, rules: Mapping[str, Rule] | None = None) -> list[str]:
    """Hold one notebook to every rule, or to those given; a file that is none is one fault."""
    notebook = Notebook(path)
    try:
        notebook.cells  # noqa: B018
    except (ValueError, KeyError, TypeError) as error:
        return [f"not a notebook: {error}"]
    if wrong := is_valid_nbformat_4_5(notebook):
        return wrong  # the other rules rely on the format
    held = RULES if rules is None else rules
    return [f"{name}: {fault}" for name, rule in held.items() for fault in rule(notebook)]
