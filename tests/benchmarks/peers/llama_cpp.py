"""llama.cpp through its Python bindings: with flash attention on and off, its default f16 KV cache, one sequence per row."""

import ctypes
from functools import lru_cache
from importlib.metadata import version

from worker import THREADS, Prepared, Timed, prompts, serve

VARIANTS = {"flash attention off": 0, "flash attention on": 1}
WEIGHT_BYTES = {"f32": 4, "bf16": 2, "int8": 34 / 32}  # Q8_0: 32 values and their scale in 34 bytes
KEPT: dict[tuple[str, str, int], dict[int, ctypes.Array]] = {}
"""Filled caches by shape, variant and batch, then by length: 8,000 tokens take a minute, and another weight format's step reads as many bytes."""


@lru_cache(maxsize=1)
def load(path: str):
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise ValueError("llama.cpp cannot load this file")
    return model


class Context:
    """A llama.cpp context whose sequences can be filled, stepped by one token and cut back."""

    def __init__(self, case: dict, flash: int):
        import llama_cpp
        import numpy

        self.lib, self.numpy, self.case, self.tokens = llama_cpp, numpy, case, prompts(case)
        model, batch = load(case["weights"]), case["batch"]
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch * (-(-case["context"] // 256) * 256), batch  # each row has n_ctx / n_seq_max
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = THREADS
        params.flash_attn_type, params.no_perf = flash, True
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise ValueError("llama.cpp makes no context for this case")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def __del__(self):
        if getattr(self, "context", None):
            self.lib.llama_batch_free(self.batch)
            self.lib.llama_free(self.context)

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """One pass over (token, position, sequence, whether its logits are wanted)."""
        self.batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            self.batch.token[i], self.batch.pos[i], self.batch.n_seq_id[i] = token, position, 1
            self.batch.seq_id[i][0], self.batch.logits[i] = sequence, wanted
        if code := self.lib.llama_decode(self.context, self.batch):
            raise ValueError(f"llama_decode gave {code}")

    def greedy(self, index: int) -> int:
        """The largest of the whole vocabulary's logits."""
        logits = self.lib.llama_get_logits_ith(self.context, index)
        return int(self.numpy.ctypeslib.as_array(logits, shape=(self.case["vocab"],)).argmax())

    def fill(self, kept: dict[int, ctypes.Array]) -> None:
        """All but the last token of the first row, from the longest cache kept; the other rows get copies of their own."""
        last = self.case["context"] - 1
        if have := max((tokens for tokens in kept if tokens <= last), default=0):
            self.lib.llama_state_seq_set_data(self.context, kept[have], len(kept[have]), 0)
        for start in range(have, last, 512):
            self.decode([(self.tokens[0][i], i, 0, False) for i in range(start, min(last, start + 512))])
        if have < last:
            kept[last] = (ctypes.c_uint8 * self.lib.llama_state_seq_get_size(self.context, 0))()
            self.lib.llama_state_seq_get_data(self.context, kept[last], len(kept[last]), 0)
        for row in range(1, self.case["batch"]):
            self.lib.llama_memory_seq_cp(self.memory, 0, row, -1, -1)
        if any(self.lib.llama_memory_seq_pos_max(self.memory, row) != last - 1 for row in range(self.case["batch"])):
            raise ValueError(f"its cache does not hold {last} tokens in each row")

    def step(self) -> list[int]:
        """One token for every row at position context - 1, taken out of the cache again."""
        last, rows = self.case["context"] - 1, range(self.case["batch"])
        self.decode([(self.tokens[row][last], last, row, True) for row in rows])
        tokens = [self.greedy(row) for row in rows]
        for row in rows:
            self.lib.llama_memory_seq_rm(self.memory, row, last, -1)
        return tokens

    def prefill(self) -> list[int]:
        """The whole prompt of each row; logits of its last token only."""
        self.lib.llama_memory_clear(self.memory, False)
        tokens, last = [], self.case["context"] - 1
        for row, prompt in enumerate(self.tokens):
            self.decode([(token, i, row, i == last) for i, token in enumerate(prompt)])
            tokens.append(self.greedy(last))
        return tokens


def prepare(case: dict) -> Prepared:
    variants = {}
    for name, flash in VARIANTS.items():
        context = Context(case, flash)
        if case["kind"] == "decode":
            context.fill(KEPT.setdefault((case["shape"], name, case["batch"]), {}))
        variants[name] = Timed(context.step if case["kind"] == "decode" else context.prefill)
    return Prepared(variants, weight_bytes=WEIGHT_BYTES[case["format"]], kv_bytes=2)


def quiet() -> None:
    """Keeps llama.cpp's log to errors."""
    import llama_cpp

    quiet.callback = llama_cpp.llama_log_callback(lambda level, text, _: level == 4 and print(text.decode(), end=""))
    llama_cpp.llama_log_set(quiet.callback, ctypes.c_void_p(0))


if __name__ == "__main__":
    quiet()
    serve(version=version("llama_cpp_python"), reads="gguf", formats=list(WEIGHT_BYTES), prepare=prepare,
          settings={"threads": THREADS, "kv": "f16, its default", "ubatch": 512, "int8": "Q8_0"})  # fmt: skip
