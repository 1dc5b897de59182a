"""Cases of vLLM's tests that do not apply to `pyvelo serve`, each with the reason."""

from __future__ import annotations

OPTIONS: dict[str, str] = {
    "--enable-force-include-usage": "usage comes if the request asks for it",
    "--root-path": "a proxy's path is cut by the proxy",
    "--reasoning-parser": "reasoning is parsed by the model's template",
    "--return-tokens-as-token-ids": "a request asks for it",
    "--tool-call-parser": "calls are parsed by the model's template",
}
"""Options of vLLM without a counterpart; a case whose server has one is skipped."""

WORDS = "the model's words cannot be had here"
USAGE = "usage has the field pyvelo, too"
NULLS = "a field that was not asked for is left out, not null"
METRICS = "times are in /metrics and in the log"
VOCABULARY = "the case needs an object of vLLM's tokenizer"

DIFFERENT: dict[str, str] = {
    "test_completion.test_single_completion": NULLS,
    "test_completion.test_completion_truncation_side": "prompts are not cut",
    "test_completion.test_logprob_token_ids": "logprobs are of the likeliest tokens and of the one that came",
    "test_completion.test_prompt_logprobs_completion[Qwen/Qwen3-0.6B-None]": NULLS,
    "test_completion.test_batch_completions": "beam search is LLM.beam_search in Python",
    "test_chat.test_prompt_logprobs_chat[HuggingFaceH4/zephyr-7b-beta-None]": NULLS,
    "test_chat.test_more_than_one_prompt_logprobs_chat": WORDS,
    "test_chat.test_single_chat_session": USAGE,
    "test_chat.test_response_format_json": WORDS,
    "test_chat.test_complex_message_content": WORDS,
    "test_chat.test_structured_outputs_choice_chat": WORDS,
    "test_chat.test_structured_outputs_json_chat": WORDS,
    "test_chunked_prompt.test_chat_completion_stream_options": WORDS,
    "test_models.test_check_models": "the case needs an adapter that cannot be had here",
    "test_chat.test_long_seed": "a seed is taken modulo 2**64: clients send negative ones",
    "test_chat.test_invocations": "no form of SageMaker's platform",
    "test_chat_completion.test_kv_transfer": "one server has one pool",
    "test_chat_completion.test_per_request_metrics": METRICS,
    "test_chat_echo.test_chat_session_with_echo": "a chat does not repeat its prompt",
    "test_chat_echo.test_prompt_logprobs": "-1 is no number of logprobs",
    "test_chat_echo.test_top_logprobs": "-1 is no number of logprobs",
    "test_chat_logit_bias_validation.test_chat_logit_bias_valid": VOCABULARY,
    "test_chat_logit_bias_validation.test_chat_logit_bias_invalid": VOCABULARY,
    "test_chat_logit_bias_validation.test_chat_logit_bias_multiple": "an error names the first wrong key",
    "test_return_token_ids.test_basic_completion_with_emoji[False]": NULLS,
    "test_return_token_ids.test_basic_completion_with_emoji[None]": NULLS,
    "test_messages.test_simple_messages": WORDS,
    "test_messages.test_system_message": WORDS,
    "test_messages.test_anthropic_streaming": "input_tokens are the ones that were not cached",
    "test_messages.test_anthropic_tool_call": WORDS,
    "test_messages.test_anthropic_structured_output": WORDS,
    "test_tokenization.test_tokenize": VOCABULARY,
    "test_tokenization.test_detokenize": "the answer has llama-server's field content, too",
}
"""Beginnings of the names of cases."""
