"""A real GPT-2, Llama and Qwen decoder: cache, model, kernels, weights, tokenizer, sampling, generation."""
