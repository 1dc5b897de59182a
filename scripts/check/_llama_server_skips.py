"""Cases of llama-server's tests that do not apply to `pyvelo serve`, each with the reason."""

from __future__ import annotations

MISSING = {
    "model_draft": "no speculative decoding",
    "spec_type": "no speculative decoding",
    "enable_ctx_shift": "a context does not shift: an answer ends at its limit",
    "server_reranking": "no reranking",
    "slot_save_path": "there are no slots: /v1/sessions keeps and forks conversations",
    "sleep_idle_seconds": "a model stays loaded",
    "ui_mcp_proxy": "no proxy for MCP servers",
    "server_tools": "the server runs no tools",
    "mcp_servers_config": "no MCP servers",
    "mcp_servers_json": "no MCP servers",
    "models_dir": "a server has one model",
    "models_preset": "a server has one model",
    "mmproj_url": "prompts are text",
    "media_path": "prompts are text",
    "gcp_compat": "no form of Google's platform",
    "model_tags": "models have no tags",
    "backend_sampling": "sampling has one implementation",
    "cors_origins": "an origin is allowed by its whole name, with the port",
}
"""Options of llama-server without a counterpart; a case that sets one is skipped."""

PROGRESS = "no progress and times in the events of OpenAI's endpoints"
FINGERPRINT = "the client sees our fingerprint, which begins with pv_"
METRICS = "metrics have the prefixes pyvelo: and vllm:, and are always on"
SLOTS = "there are no slots"
BODY = "an input is a text, token ids, or a list of either, as OpenAI has it"
NO_FILE = "the model cannot be had here"

DIFFERENT: dict[str, str] = {
    "test_basic.test_server_multiple_addresses": "a server listens at one address",
    "test_basic.test_server_props": "a server has no seed of its own",
    "test_basic.test_server_slots": SLOTS,
    "test_basic.test_load_split_model": NO_FILE,
    "test_chat_completion.test_chat_completion_cached_tokens": "the counts are of the model's vocabulary",
    "test_chat_completion.test_chat_completion_stream": "the event of the end has the last text, too",
    "test_chat_completion.test_chat_completion_with_openai_library": FINGERPRINT,
    "test_chat_completion.test_chat_template_assistant_prefill": (
        "a message of the assistant is continued if continue_final_message says so"
    ),
    "test_chat_completion.test_invalid_chat_completion_req[messages7]": (
        "two messages of the assistant are for the template to judge"
    ),
    "test_chat_completion.test_chat_completion_with_timings_per_token": PROGRESS,
    "test_chat_completion.test_logprobs_stream": "the client sees OpenAI's empty text in the first event",
    "test_chat_completion.test_context_size_exceeded": "the error has OpenAI's code context_length_exceeded",
    "test_chat_completion.test_return_progress": PROGRESS,
    "test_chat_completion.test_verbose_debug": "an answer does not repeat the prompt: see /apply-template",
    "test_compat_anthropic.test_anthropic_tool_result_with_image": "an image is refused with 400, not 500",
    "test_compat_anthropic.test_anthropic_vision_format_accepted": "an image is refused with 400, not 500",
    "test_compat_anthropic.test_anthropic_empty_messages": "messages must not be empty, as at Anthropic",
    "test_compat_oai_responses.test_responses_stream_with_llama_telemetry": PROGRESS,
    "test_completion.test_completion_stream[": "generation_settings has no samplers that do not exist here",
    "test_completion.test_completion_with_openai_library": FINGERPRINT,
    "test_completion.test_completion_unified": (
        "requests wait for the pool, and each ends at n_ctx; the case wants failures"
    ),
    "test_completion.test_n_probs_post_sampling": "probabilities are from before the samplers",
    "test_completion.test_cancel_request": SLOTS,
    "test_completion.test_completion_prompt_cache": "the counts are of the model's vocabulary",
    "test_ctx_shift.test_ctx_shift_disabled_short_prompt[-1": "an answer at the end of n_ctx is no cut one",
    "test_ctx_shift.test_ctx_shift_disabled_long_prompt": "the error has other words",
    "test_embedding.test_embedding_mixed_input[input3": BODY,
    "test_embedding.test_embedding_mixed_input[input5": BODY,
    "test_embedding.test_embedding_mixed_input[input7": BODY,
    "test_embedding.test_embedding_mixed_input[input8": BODY,
    "test_embedding.test_embedding_mixed_input[input9": BODY,
    "test_embedding.test_embedding_mixed_input[input10": BODY,
    "test_embedding.test_embedding_content_text_same_as_string": BODY,
    "test_embedding.test_embedding_pooling_none": "a text has one vector",
    "test_embedding.test_embedding_error_prompt_too_long": "the error has other words",
    "test_ignore_eos.test_ignore_eos_populates_logit_bias": "ignore_eos is no bias in generation_settings",
    "test_infill": "no completion between two texts",
    "test_kv_keep_only_active": SLOTS,
    "test_lora": NO_FILE,
    "test_metrics.test_metrics_disabled": METRICS,
    "test_metrics.test_metrics_prometheus_format": METRICS,
    "test_metrics.test_metrics_prompt_processed_and_cached": METRICS,
    "test_metrics.test_metrics_predicted_total_matches_requests": METRICS,
    "test_metrics.test_metrics_slots_idle_after_completion": SLOTS,
    "test_metrics.test_metrics_embedding_prompt_is_counted": METRICS,
    "test_metrics.test_metrics_timings_on_prompt_progress": PROGRESS,
    "test_proxy": "no proxy for MCP servers",
    "test_router": "a server has one model",
    "test_security.test_access_static_assets_without_api_key": "the page has other files",
    "test_security.test_correct_api_key": "/completions is OpenAI's endpoint, as /v1/completions",
    "test_security.test_cors_options": "CORS is off, and --cors-origin allows origins by name",
    "test_template.test_date_inside_prompt": "a template gets the date by strftime_now, as in transformers",
    "test_speculative": "no speculative decoding",
    "test_stream": "a stream ends with its connection",
}
"""Beginnings of the names of cases."""
