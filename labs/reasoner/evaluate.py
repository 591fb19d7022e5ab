"""The reasoner's card, from held-out problems: `python labs/reasoner/evaluate.py [--models FOLDER] [--record]`.

Every answer is checked by computation. `--record` writes labs/reasoner/card.json, and the table of README.md from it.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median

from decodelab.arithmetic.records import summarise
from decodelab.decoder import weights
from decodelab.decoder.model import Decoder
from decodelab.decoder.tokenizer import Tokenizer, load_tokenizer
from decodelab.measuring import machine, thinking
from decodelab.measuring.clock import interleaved
from decodelab.measuring.experiments import step_calls
from decodelab.teaching import tasks
from decodelab.teaching.tasks import Problem

HERE, MODELS = Path(__file__).parent, Path(__file__).parents[2] / "data" / "models"
BUDGET, SEED = 2_000, 2
BEYOND = {  # problems of sizes that training never showed
    "collatz, starts of five digits": lambda rng: tasks.collatz(rng.randrange(10_000, 100_000)),
    "multiplication, four digits by three": lambda rng: tasks.multiplication(rng.randrange(1_000, 10_000), rng.randrange(100, 1_000)),
    "search, four items": lambda rng: tasks.search(items := [rng.randrange(1, 10) for _ in range(4)], sum(items[1:3])),
}


def accuracy(model: Decoder, tokenizer: Tokenizer, problems: Sequence[Problem]) -> dict:
    """What the full trace achieves, and how long prompts and traces are."""
    result = thinking.think(model, tokenizer, problems, tasks=tasks.TASKS, budget=BUDGET)
    low, high = thinking.wilson(result.right, len(problems))
    traces = [answer.trace_tokens for answer in result.answers]
    prompts = [answer.prompt_tokens for answer in result.answers]
    return {"problems": len(problems), "right": result.right, "accuracy": result.accuracy, "accuracy_low": low, "accuracy_high": high,
            "trace_exact": sum(a.trace == p.trace for a, p in zip(result.answers, problems, strict=True)) / len(problems),
            "median_prompt_tokens": median(prompts), "median_trace_tokens": median(traces), "longest_trace_tokens": max(traces),
            "decode_s": result.decode_s}  # fmt: skip


def step_ratio(models: Sequence[Decoder], *, context: int = 256) -> dict:
    """Seconds of one decode step of target and draft, in turns."""
    calls = [call for model in models for call in step_calls(model, model.new_cache(max_len=context), [context])]
    target, draft = (summarise(seconds) for seconds in interleaved(calls, rounds=200, budget_s=10, device="cpu", warmup=5))
    return {"context": context, "target_s": target.median_s, "draft_s": draft.median_s,
            "draft_over_target": draft.median_s / target.median_s, "n": target.n}  # fmt: skip


def table(card: dict) -> str:
    """The card's tasks as a table."""
    lines = ["| task | problems | right | 95 % interval | median prompt | median trace | longest |", "|---|---|---|---|---|---|---|"]
    for name, row in {**card["tasks"], **card["beyond"]}.items():
        lines.append(f"| {name} | {row['problems']} | {row['accuracy']:.1%} | {row['accuracy_low']:.1%} to {row['accuracy_high']:.1%} | "
                     f"{row['median_prompt_tokens']:.0f} tokens | {row['median_trace_tokens']:,.0f} tokens | {row['longest_trace_tokens']:,} |")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder with reasoner/ and reasoner-draft/")
    parser.add_argument("--problems", type=int, default=400, help="held-out problems of each task (default 400)")
    parser.add_argument("--record", action="store_true", help="write card.json and README's table")
    args = parser.parse_args()
    target, draft = (weights.load(args.models / name, dtype="float32", path="eager") for name in weights.REASONERS)
    tokenizer = load_tokenizer(args.models / "reasoner")
    card = {"made_by": "python labs/reasoner/evaluate.py --record", "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": asdict(machine.describe()), "dtype": "float32", "budget": BUDGET, "seed": SEED,
            "training": {name: json.loads((args.models / name / "training.json").read_text()) for name in weights.REASONERS},
            "step": step_ratio((target, draft)),
            "tasks": {name: accuracy(target, tokenizer, tasks.held_out_problems(name, args.problems, seed=SEED)) for name in tasks.TASKS},
            "beyond": {name: accuracy(target, tokenizer, [draw(Random(seed)) for seed in range(args.problems // 4)])
                       for name, draw in BEYOND.items()}}  # fmt: skip
    print(table(card))
    print(f"a step of the draft takes {card['step']['draft_over_target']:.3f} of the target's, at {card['step']['context']} tokens")
    if args.record:
        (HERE / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        readme = HERE / "README.md"
        text = readme.read_text(encoding="utf-8")
        readme.write_text(re.sub(r"(?s)(<!-- table -->\n).*?(<!-- end -->)", rf"\g<1>{table(card)}\n\g<2>", text), encoding="utf-8")


if __name__ == "__main__":
    main()
