"""Names of arguments in vLLM, llama-cpp-python, Ollama and transformers, and what does the same here."""

from __future__ import annotations

__all__ = ["EQUIVALENTS", "OF_CALLS", "WITHOUT"]

EQUIVALENTS: dict[str, str] = {
    "add_bos": "add_special",
    "add_special_tokens": "add_special",
    "cache_type_k": "kv_type",
    "cache_type_v": "kv_type",
    "choice": "regex",
    "context_length": "n_ctx",
    "context_window": "n_ctx",
    "ctx_size": "n_ctx",
    "enable_prefix_caching": "prefix_cache",
    "gpu_layers": "n_gpu_layers",
    "gpu_memory_utilization": "memory_utilization",
    "guided_choice": "regex",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "kv_cache_dtype": "kv_type",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "lora_adapters": "lora",
    "lora_path": "lora",
    "lora_request": "lora",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_seq_len": "n_ctx",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "model_name": "model",
    "model_path": "model",
    "n_batch": "max_batch_tokens",
    "n_parallel": "max_num_seqs",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "n_seq_max": "max_num_seqs",
    "n_threads_batch": "n_threads",
    "n_ubatch": "max_batch_tokens",
    "num_beams": "beam_width",
    "num_ctx": "n_ctx",
    "num_gpu": "n_gpu_layers",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "num_thread": "n_threads",
    "repeat_penalty": "repetition_penalty",
    "response_format": "json_schema",
    "special": "parse_special",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "swap_space": "swap_bytes",
    "temp": "temperature",
    "threads": "n_threads",
    "top_logprobs": "logprobs",
    "type_k": "kv_type",
    "type_v": "kv_type",
}

_TYPES = "weights have the types of the file, so choose the file; kv_type is the type of the cache"
_SPLIT = "layers are shared out over the GPUs that there are: see n_gpu_layers"
_MAPPED = "leave it out: weights are mapped from the file, and packed for this processor"
_TEMPLATE = "leave it out: the model's own template is used, and chat takes chat_template="
_SAMPLER = "this sampler does not exist here: top_k, top_p, min_p and the penalties do"
_BEAMS = "call beam_search with BeamSearchParams"
_GUIDED = "give json_schema=, regex= or grammar= instead"
_PROCESSORS = "functions on logits are not supported; logit_bias={token: value} adds to the logit of a token"
_ALWAYS = "leave it out: it is always so"
_CACHE = "set the environment variable HF_HOME"
_DEVICE = "give n_gpu_layers: 0 for the CPU, -1 for GPUs, or 'auto'"
_DRAFTS = "speculative decoding does not exist here"
_TOKEN = "set the environment variable HF_TOKEN"
_HUB = 'give model="organization/repository:TYPE"; files are in the cache of huggingface-hub'
_THINK = 'a template has its own names, often template_arguments={"enable_thinking": False}'

WITHOUT: dict[str, str] = {
    "bad_words": "words cannot be banned; logit_bias={token: -100} bans a token",
    "api_key": "a model on this machine needs none; for the hub, set the environment variable HF_TOKEN",
    "cache_dir": _CACHE,
    "chat_format": _TEMPLATE,
    "chat_handler": _TEMPLATE,
    "clip_model_path": "images do not work here yet",
    "cpu_offload_gb": "give n_gpu_layers: the other layers run on the CPU",
    "device": _DEVICE,
    "device_map": _DEVICE,
    "disable_log_stats": "leave it out: stats() tells them when it is called",
    "do_sample": "give temperature=0 for the likeliest tokens, or a temperature above 0",
    "download_dir": _CACHE,
    "draft_model": _DRAFTS,
    "dtype": _TYPES,
    "embedding": "leave it out: embed works with every model",
    "embeddings": "leave it out: embed works with every model",
    "enable_chunked_prefill": _ALWAYS,
    "enable_lora": "give lora=, or load_lora later",
    "early_stopping": _BEAMS,
    "enable_thinking": _THINK,
    "enforce_eager": "leave it out: there are no CUDA graphs to switch off",
    "filename": _HUB,
    "flash_attn": _ALWAYS,
    "functions": "give tools=[...]",
    "guided_decoding": _GUIDED,
    "hf_token": _TOKEN,
    "images": "images do not work here yet",
    "keep_alive": "a model stays loaded until close",
    "last_n_tokens_size": "penalties look at the whole sequence",
    "load_format": "models are GGUF files",
    "load_in_4bit": _TYPES,
    "load_in_8bit": _TYPES,
    "logits_processor": _PROCESSORS,
    "logits_processors": _PROCESSORS,
    "logits_all": "leave it out: ask for SamplingParams(prompt_logprobs=...)",
    "low_vram": "give n_gpu_layers: the other layers run on the CPU",
    "main_gpu": _SPLIT,
    "mmproj": "images do not work here yet",
    "mirostat": _SAMPLER,
    "mirostat_mode": _SAMPLER,
    "n_keep": "leave it out: nothing is dropped from a prompt, which has to fit n_ctx",
    "numa": "leave it out: threads stay on the cores that the process may use",
    "offload_kqv": "leave it out: the cache of a layer is where the layer is",
    "pipeline_parallel_size": _SPLIT,
    "pooling_type": "call embed with pooling='mean', 'cls' or 'last'",
    "pretrained_model_name_or_path": _HUB,
    "prompt": "generate takes a text, and chat takes messages",
    "prompt_token_ids": "give the list of token numbers in place of the text of a prompt",
    "quantization": _TYPES,
    "reasoning_effort": 'give template_arguments={"reasoning_effort": ...}, if the template has it',
    "repeat_last_n": "penalties look at the whole sequence",
    "repo_id": _HUB,
    "revision": _HUB,
    "rope_freq_base": "leave it out: the file has it",
    "rope_freq_scale": "leave it out: the file has it",
    "rope_scaling": "leave it out: the file has it",
    "skip_tokenizer_init": "leave it out: the file has the tokenizer",
    "speculative_config": _DRAFTS,
    "split_mode": _SPLIT,
    "structured_outputs": _GUIDED,
    "system": 'give a message with the role "system"',
    "tensor_parallel_size": _SPLIT,
    "tensor_split": _SPLIT,
    "tfs_z": _SAMPLER,
    "think": _THINK,
    "token": _TOKEN,
    "tokenizer": "leave it out: the file has the tokenizer",
    "torch_dtype": _TYPES,
    "trust_remote_code": "leave it out: a GGUF file has no code",
    "typical_p": _SAMPLER,
    "use_auth_token": _TOKEN,
    "use_beam_search": _BEAMS,
    "use_tqdm": "leave it out: calls show no progress bar",
    "use_mlock": _MAPPED,
    "use_mmap": _MAPPED,
    "verbose": 'leave it out: messages go to logging.getLogger("pyvelo")',
    "vocab_only": "LLM loads the whole model; pyvelo.models.gguf_scan reads a file's metadata",
}
"""Names without a counterpart, and what to do instead."""

OF_CALLS: dict[str, str] = {
    "chat_template": "give it to each call: llm.chat(messages, chat_template=...)",
}
"""Arguments of calls that other libraries give to the constructor."""
