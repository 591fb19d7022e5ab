"""transformers on its defaults: SDPA attention, a DynamicCache, no compilation."""

from functools import lru_cache
from importlib.metadata import version

from worker import THREADS, Prepared, Timed, prompts, serve

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


@lru_cache(maxsize=1)
def load(folder: str, format: str):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPES[format]), attn_implementation="sdpa").eval()


def prepare(case: dict) -> Prepared:
    import torch

    model = load(case["weights"], case["format"])
    call = torch.inference_mode()(prefill_call if case["kind"] == "prefill" else decode_call)(model, case)
    return Prepared({"": Timed(torch.inference_mode()(call))}, weight_bytes=model.dtype.itemsize, kv_bytes=model.dtype.itemsize)


def prefill_call(model, case: dict):
    """Reads the prompts into a new cache; logits of the last token only."""
    import torch

    ids = torch.tensor(prompts(case))
    return lambda: model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()


def decode_call(model, case: dict):
    """One token for every row on a cache of random K and V, cropped again."""
    import torch
    from transformers import DynamicCache

    c, ids = model.config, torch.tensor(prompts(case))[:, -1:]
    heads = getattr(c, "num_key_value_heads", c.num_attention_heads)
    size = (case["batch"], heads, case["context"] - 1, c.hidden_size // c.num_attention_heads)
    past = DynamicCache(config=c)
    for layer in range(c.num_hidden_layers):
        past.update(torch.randn(size, dtype=model.dtype), torch.randn(size, dtype=model.dtype), layer)

    def step() -> list[int]:
        tokens = model(ids, past_key_values=past, use_cache=True).logits[:, -1].argmax(-1).tolist()
        past.crop(-1)
        return tokens

    return step


if __name__ == "__main__":
    serve(version=version("transformers"), reads="folder", formats=list(DTYPES), prepare=prepare,
          settings={"threads": THREADS, "attention": "sdpa", "cache": "DynamicCache", "torch": version("torch")})  # fmt: skip
