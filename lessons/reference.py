"""Writes reference.md, every formula and word of the course, out of the library's docstrings: python lessons/reference.py"""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LESSONS = Path(__file__).resolve().parent
LIBRARY = LESSONS.parent / "lib" / "decodelab"
OPERAND = r"[\w().^,-]+(?: [\w().^,-]+){0,2}"  # at most three words: what is longer is prose
EXPRESSION = rf"{OPERAND}(?: [-+*/] {OPERAND})+|sum of {OPERAND}|\S+\^\S+"
PAGE = """# Formulas and words

Every formula with its unit and its lesson, then the field's words as the course means them. This page is written by

    python lessons/reference.py

from the docstrings in `lib/decodelab`; mend them there, then run it again. A dash: the docstring names no lesson.

## Formulas

{}

## Words

Each meaning is the first sentence of the object's docstring. Where that names no lesson, the link is to the first
lesson with the word in its title, else in its text. {}

{}
"""
TERMS = {  # word -> the object whose docstring begins with its definition
    "acceptance": "decoder.speculative.acceptance", "admission": "serving.scheduler.admits", "arithmetic intensity": "arithmetic.cost.intensity",
    "break-even": "arithmetic.speculation.RoundPrice.break_even", "BW_kv": "measuring.machine.kv_bandwidth",
    "BW_w": "measuring.machine.matvec_bandwidth", "cache slots": "arithmetic.catalog.slots_needed",
    "capacity": "arithmetic.planning.sequences_that_fit", "card": "arithmetic.records.Card", "chunk": "serving.scheduler.Chunk",
    "crossover": "arithmetic.cost.crossover_tokens", "decode": "decoder.generate.decode_step",
    "decode throughput": "arithmetic.records.Run.decode_tokens_per_s", "disaggregation": "serving.simulator.simulate_pools",
    "experts": "arithmetic.cost.expected_experts", "floor": "arithmetic.cost.floor_constants", "GiB": "arithmetic.units",
    "GQA": "decoder.model.Attention", "int8": "decoder.kernels.quantise", "ITL": "arithmetic.records.Run.itl_s",
    "KV bytes": "arithmetic.cost.kv_bytes", "KV bytes per token": "arithmetic.cost.kv_bytes_per_token", "KV cache": "decoder.cache.KVCache",
    "layer split": "arithmetic.planning.layer_split_step", "ledger": "measuring.ledger", "MBU": "arithmetic.records.utilisation",
    "occupancy": "serving.report.occupancy", "overlap": "arithmetic.speculation.overlap", "page": "decoder.cache.PagePool",
    "peak": "measuring.machine.gemm_rate", "preemption": "serving.scheduler.Scheduler._preempt", "prefill": "decoder.generate.prefill",
    "prompt lookup": "decoder.speculative.PromptLookup", "read roof": "measuring.machine.read_bandwidth",
    "residual": "decoder.speculative.residual", "ridge": "arithmetic.records.Card.ridge_flops_per_byte",
    "ridge batch": "arithmetic.planning.ridge_batch", "scheduler": "serving.scheduler", "simulator": "serving.simulator",
    "speculative decoding": "decoder.speculative", "step time": "arithmetic.cost.step_time", "t(n)": "arithmetic.cost.Growth",
    "tensor split": "arithmetic.planning.tensor_split_step", "time to first answer token": "arithmetic.latency.RequestRecord.answer_s",
    "tokens per round": "arithmetic.speculation.expected_tokens", "TPOT": "arithmetic.latency.RequestRecord.tpot_s",
    "TTFT": "arithmetic.latency.RequestRecord.ttft_s", "verification": "arithmetic.speculation.verify_time",
    "visible pairs": "arithmetic.cost.visible_pairs", "weight bytes": "arithmetic.cost.weight_bytes_per_step",
    "Wilson's interval": "measuring.thinking.wilson",
}  # fmt: skip


def docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Dotted name and docstring of a module and of every class and function in it."""
    yield name, ast.get_docstring(node) or ""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from docstrings(child, f"{name}.{child.name}")


def sentence(docstring: str) -> str:
    """The first sentence."""
    return re.split(r"(?<=[^.\s]\.)\s", " ".join(docstring.split("\n\n")[0].split()))[0]


def formula(docstring: str) -> str:
    """The indented lines; else a paragraph's `name = ...`; else an expression in the first sentence."""
    prose = docstring.partition(">>>")[0]
    if block := re.findall(r"^ {4}(\S.*)$", prose, re.M):
        return " ".join(block)
    if equations := re.search(r"\n\n(\w+ = .+?)(?=: |\.\s|\.$)", prose, re.S):
        return equations[1]
    parts = re.split(r"[:;,] (?:so )?(?![^(]*\))", sentence(docstring).removesuffix("."))
    return next((part for part in parts if re.fullmatch(EXPRESSION, part)), "")


def link(notebook: Path) -> str:
    """A lesson as [05](05_x.ipynb), a lab as [lab 05](../labs/05_x.ipynb)."""
    lab, number = notebook.parent.name == "labs", notebook.name[:2]
    return f"[lab {number}](../labs/{notebook.name})" if lab else f"[{number}]({notebook.name})"


def taught_in(docstring: str) -> str:
    """Links to what `Taught in:` names. Raises: IndexError where there is no such notebook."""
    named = re.findall(r"\b((?:lessons|labs)/\d\d)", docstring.partition("Taught in:")[2])
    return ", ".join(link(sorted(LESSONS.parent.glob(f"{name}_*.ipynb"))[0]) for name in named)


@cache
def prose(notebook: Path) -> str:
    """The text of a notebook's Markdown cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    told = (cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    return "\n".join("".join(lines) for lines in told)


def first_use(word: str) -> str:
    """Link to the first lesson with the word in its title, else in its text."""
    pattern = re.compile(rf"(?<!\w){re.escape(word)}s?(?!\w)", re.I)
    for title in (True, False):
        for notebook in sorted(LESSONS.glob("*.ipynb")):
            text = prose(notebook)
            if pattern.search(text.partition("\n")[0] if title else text):
                return link(notebook)
    return ""


def table(*rows: tuple[str, ...]) -> str:
    """The rows in Markdown, the first one as header, whatever their cells hold."""
    # code stays as it is, what Markdown would read is escaped
    marks = re.compile(r"(`.*?`)|([*<$])")
    lines = []
    for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        plain = (" ".join(cell.replace("|", r"\|").split()) or "–" for cell in cells)
        text = (marks.sub(lambda hit: hit[1] or f"\\{hit[2]}", cell) for cell in plain)
        lines.append(f"| {' | '.join(text)} |")
    return "\n".join(lines)


def page() -> str:
    """The page: formulas in the order of lessons, then of modules; words in that of the alphabet."""
    docs, formulas, words = {}, [], []
    for file in sorted(LIBRARY.glob("*/*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docs |= docstrings(tree, f"{file.parent.name}.{file.stem}")
    for name, text in docs.items():
        if name.startswith("arithmetic.") and "._" not in name and (found := formula(text)):
            name, found = name.removeprefix("arithmetic."), found.replace("`", "")
            formulas.append((f"`{name}`", sentence(text), f"`{found}`", taught_in(text)))
    formulas.sort(key=lambda cells: re.findall(r"\d\d", cells[3])[:1] or ["none"])
    for word in sorted(TERMS, key=str.lower):
        text = docs[TERMS[word]]
        words.append((word, sentence(text), f"`{TERMS[word]}`", taught_in(text) or first_use(word)))
    formulas.insert(0, ("name", "meaning and unit", "formula", "taught in"))
    words.insert(0, ("word", "meaning", "from", "lesson"))
    dims = sentence(docs["decoder.model"].partition("\n\n")[2])
    return PAGE.format(table(*formulas), dims, table(*words))


if __name__ == "__main__":
    (LESSONS / "reference.md").write_text(page(), encoding="utf-8", newline="\n")
