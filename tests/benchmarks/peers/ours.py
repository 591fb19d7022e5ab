"""This library's decoder, loaded as a learner loads it."""

from functools import lru_cache
from importlib.metadata import version

import torch
from worker import Prepared, Timed, prompts, serve

from decodelab.decoder import weights
from decodelab.decoder.generate import prefill
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import sample
from decodelab.measuring import experiments, machine

DTYPES = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}
WEIGHT_BYTES = {"f32": 4, "bf16": 2, "int8": 1}


@lru_cache(maxsize=1)
def load(folder: str, format: str) -> Decoder:
    model = weights.load(folder, dtype=DTYPES[format])
    experiments.warm_weights(model)
    return model


def prepare(case: dict) -> Prepared:
    model = load(case["weights"], case["format"])
    cache, tokens = model.new_cache(max_len=case["context"], batch=case["batch"]), prompts(case)

    def read_prompts() -> list[int]:
        cache.reset()
        return sample(prefill(model, tokens, cache=cache)).tolist()

    step = read_prompts if case["kind"] == "prefill" else experiments.step_calls(model, cache, [case["context"]])[0]
    return Prepared({"": Timed(step)}, weight_bytes=WEIGHT_BYTES[case["format"]], kv_bytes=model.dtype.itemsize, path=model.path)


if __name__ == "__main__":
    serve(version=version("decodelab"), reads="folder", formats=list(DTYPES), prepare=prepare,
          settings={"threads": machine.use_threads(), "torch": torch.__version__})  # fmt: skip
