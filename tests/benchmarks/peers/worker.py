"""What all workers share: commands as JSON lines on stdin, one JSON line each as the answer, and the clock.

    hello                               {version, settings, reads, formats}
    prepare {case}                      {first_call_s and tokens by variant, weight_bytes, kv_bytes, path}
    step {variant, seconds, warmup}     {seconds: [each timed step]}
    release                             {}

Each answer has "ok"; where that is false, "note" says why in one line and the next command may go on.

Standard library only: a peer runs in its own interpreter. Whatever a library prints goes to the log, stderr.
"""

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # vllm.py beside this file would hide the package of that name
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))


@dataclass
class Timed:
    """One way of doing a case: `step` is timed and returns its tokens; `begin` comes before a turn and is not timed."""

    step: Callable[[], object]
    begin: Callable[[], object] = lambda: None


@dataclass
class Prepared:
    """A case ready to run: its variants by name ("" where there is one), and the bytes of one stored value."""

    variants: dict[str, Timed]
    weight_bytes: float
    kv_bytes: float
    path: str = ""  # ours: fast, or eager where nothing compiles


def prompts(case: dict) -> list[list[int]]:
    """The same token ids in every worker: one prompt of `context` tokens for each of `batch` sequences."""
    draw = random.Random(4)
    return [[draw.randrange(case["vocab"]) for _ in range(case["context"])] for _ in range(case["batch"])]


def serve(*, version: str, settings: dict, reads: str, formats: list[str], prepare: Callable[[dict], Prepared]) -> None:
    """Answers commands until stdin ends. `reads` is "folder" (Hugging Face) or "gguf"; a case that raises is answered, not fatal."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    ready: Prepared | None = None
    for line in sys.stdin:
        asked, answer = json.loads(line), {"ok": True}
        try:
            if asked["command"] == "hello":
                answer |= {"version": version, "settings": settings, "reads": reads, "formats": formats}
            elif asked["command"] == "step":
                answer["seconds"] = steps(ready.variants[asked["variant"]], seconds=asked["seconds"], warmup=asked["warmup"])
            else:  # prepare or release: both free the case before
                ready = None
                gc.collect()
            if asked["command"] == "prepare":
                ready = prepare(asked["case"])
                answer |= {**first_calls(ready), "weight_bytes": ready.weight_bytes, "kv_bytes": ready.kv_bytes, "path": ready.path}
        except Exception as error:
            answer = {"ok": False, "note": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def first_calls(ready: Prepared) -> dict:
    """Seconds and tokens of each variant's first step, which may compile."""
    first, tokens = {}, {}
    for name, timed in ready.variants.items():
        began = time.perf_counter()
        timed.begin()
        tokens[name] = timed.step()
        first[name] = time.perf_counter() - began
    return {"first_call_s": first, "tokens": tokens}


def steps(timed: Timed, *, seconds: float, warmup: int) -> list[float]:
    """Seconds of each step, for about `seconds`, at least one; `warmup` steps before them are not kept."""
    timed.begin()
    for _ in range(warmup):
        timed.step()
    taken: list[float] = []
    while not taken or sum(taken) < seconds:
        began = time.perf_counter()
        timed.step()
        taken.append(time.perf_counter() - began)
    return taken
