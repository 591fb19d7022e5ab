"""A real GPT-2 / Llama decoder: cache, model, weights, tokenizer, sampling, generation."""
