"""vLLM's engine on the CPU, in this process: each timed step is one `engine.step()` with every request in decode.

A context grows by one token a step and begins again at the case's context in the turn after its 32nd.
Served over HTTP, vLLM keeps one core for its scheduler; in process all threads compute.
"""

import os
from importlib.metadata import version
from itertools import count

from worker import THREADS, Prepared, Timed, prompts, serve

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")
ENGINES: dict[str, object] = {}
RUNNING: list[str] = []
NUMBERS = count()


def load(folder: str):
    """The engine of this model; the one before is taken down first."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if folder not in ENGINES:
        if ENGINES:
            ENGINES.clear()
            RUNNING.clear()
            cleanup_dist_env_and_memory()
        ENGINES[folder] = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16").llm_engine
    return ENGINES[folder]


def prepare(case: dict) -> Prepared:
    engine, make = load(case["weights"]), prefill if case["kind"] == "prefill" else decode
    stop(engine)
    return Prepared({"": make(engine, case)}, weight_bytes=2, kv_bytes=2)


def stop(engine) -> None:
    """Takes the requests of the last turn out of the engine."""
    engine.abort_request(RUNNING)
    RUNNING.clear()


def add(engine, tokens: list[list[int]], max_tokens: int) -> list[str]:
    """Queues one greedy request for each prompt; returns their names."""
    from vllm import SamplingParams

    names = [str(next(NUMBERS)) for _ in tokens]
    for name, prompt in zip(names, tokens, strict=True):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    return names


def prefill(engine, case: dict) -> Timed:
    """Whole prompts, none of them in the prefix cache, to their first token."""

    def step() -> list[int]:
        if not engine.reset_prefix_cache():
            raise ValueError("the prefix cache is in use, so a prompt would not be read in full")
        names, tokens = add(engine, prompts(case), max_tokens=1), {}
        while len(tokens) < len(names):
            tokens |= {output.request_id: output.outputs[0].token_ids[-1] for output in engine.step()}
        return [tokens[name] for name in names]

    return Timed(step)


def decode(engine, case: dict) -> Timed:
    """All requests are past their prompt before the first step."""
    grown = 0

    def begin() -> None:
        if RUNNING and grown < 32:
            return
        stop(engine)
        RUNNING.extend(add(engine, [prompt[:-1] for prompt in prompts(case)], max_tokens=4096))
        waiting = set(RUNNING)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}

    def step() -> list[int]:
        nonlocal grown
        outputs = engine.step()
        if len(outputs) != case["batch"]:
            raise ValueError(f"{len(outputs)} of {case['batch']} requests were in decode; ask for shorter turns")
        grown = len(outputs[0].outputs[0].token_ids)
        return [output.outputs[0].token_ids[-1] for output in outputs]

    return Timed(step, begin)


if __name__ == "__main__":
    serve(version=version("vllm"), reads="folder", formats=["bf16"], prepare=prepare,
          settings={"threads": THREADS, "engine": "in process, prefix cache on", "torch": version("torch")})  # fmt: skip
