// Chat formats: upstream's common/chat.h behind velo-chat.h.
#include "big-stack.hpp"
#include "guard.hpp"
#include "velo-chat.h"

#include "budget.hpp"

#include "chat.h"
#include "json.h"

#include <algorithm>
#include <cstring>
#include <memory>

struct velo_chat_template {
    common_chat_templates_ptr templates;
};

struct velo_chat_plan {
    common_chat_parser_params parser;
    std::string               json;
};

namespace {

constexpr size_t max_source    = 64 << 10; // as in pyvelo/chat/template.py
constexpr size_t max_request   = 1 << 20;
constexpr size_t max_depth     = 100;
constexpr size_t small_stack   = 64;        // levels that fit on any thread's stack
constexpr size_t stack_a_level = 16 << 10;  // bytes
constexpr size_t big_stack     = 256 << 20; // virtual; the deepest template of 64 KiB takes a part of it

// some ten times the need of the largest templates that upstream has with a few tools; many tools take up to 24
// operations for each byte of the request
constexpr uint64_t operations        = 1'000'000;
constexpr uint64_t operations_a_byte = 64;
constexpr size_t   memory            = 384 << 20;

// Run work on a template and a request of so many bytes, with limits. Its errors are errors of either.
template <class Body> void with_limits(const char * what, size_t request_len, const Body & body) {
    velo::on_big_stack(big_stack, [&] {
        const velo::catch_aborts catching(VELO_INVALID);
        velo::chat_budget        budget({operations + operations_a_byte * std::min(request_len, max_request), memory,
                                         big_stack / 4, std::chrono::seconds(10)});
        try {
            body(budget);
            budget.check();
        } catch (const velo::error &) {
            throw;
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & error) {
            if (const char * reached = budget.limit_reached()) { // upstream adds the place to the message
                velo::fail(VELO_INVALID, "the chat template is too costly%s: %s",
                           request_len ? " for these messages and tools" : "", reached);
            }
            const bool sliced = std::strcmp(error.what(), "std::exception") == 0; // upstream rethrows a copy
            velo::fail(VELO_INVALID, "%s: %.500s", what, sliced ? "it is not well formed" : error.what());
        }
    });
}

size_t count_openers(std::string_view text) {
    return static_cast<size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return c == '[' || c == '{' || c == '(' || c == '<'; }));
}

// Parse JSON whose depth is limited, because upstream recurses through it.
common_json read_request(const char * request, size_t len) {
    velo::check_pointer(request, "request");
    if (len > max_request) {
        velo::fail(VELO_INVALID, "the request has %zu bytes, but at most %zu can be read", len, max_request);
    }
    size_t depth     = 0;
    bool   in_string = false;
    for (size_t i = 0; i < len; ++i) {
        const char c = request[i];
        if (in_string && c == '\\') {
            ++i;
        } else if (c == '"') {
            in_string = !in_string;
        } else if (!in_string && (c == '[' || c == '{')) {
            if (++depth > max_depth) {
                velo::fail(VELO_INVALID, "the request is nested deeper than %zu levels", max_depth);
            }
        } else if (!in_string && (c == ']' || c == '}') && depth > 0) {
            --depth;
        }
    }
    return common_json::parse(std::string(request, len));
}

common_chat_templates_inputs inputs_of(const common_json & request) {
    common_chat_templates_inputs inputs;
    inputs.messages            = common_chat_msgs_parse_oaicompat(request.at("messages"));
    inputs.tools               = common_chat_tools_parse_oaicompat(request.value("tools", common_json()));
    inputs.tool_choice         = common_chat_tool_choice_parse_oaicompat(request.value("tool_choice", "auto"));
    inputs.parallel_tool_calls = request.value("parallel_tool_calls", false);
    inputs.reasoning_format =
        request.value("reasoning", true) ? COMMON_REASONING_FORMAT_DEEPSEEK : COMMON_REASONING_FORMAT_NONE;
    inputs.enable_thinking       = request.value("enable_thinking", true);
    inputs.add_generation_prompt = request.value("add_generation_prompt", true);
    if (request.contains("arguments")) {
        for (const auto & [name, value] : request.at("arguments").items()) {
            inputs.chat_template_kwargs[name] = value.dump();
        }
    }
    return inputs;
}

const char * name_of(common_grammar_trigger_type type) {
    switch (type) {
    case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN:
        return "token";
    case COMMON_GRAMMAR_TRIGGER_TYPE_WORD:
        return "word";
    case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:
        return "pattern";
    case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL:
        return "pattern_full";
    }
    return "";
}

std::string describe(const common_chat_params & params, const velo::chat_budget & budget) {
    common_json triggers = common_json::array();
    for (const common_grammar_trigger & trigger : params.grammar_triggers) {
        triggers.push_back({{"type", name_of(trigger.type)}, {"value", trigger.value}});
    }
    common_json plan          = common_json::object();
    plan["prompt"]            = params.prompt;
    plan["generation_prompt"] = params.generation_prompt;
    plan["grammar"]           = params.grammar;
    plan["grammar_lazy"]      = params.grammar_lazy;
    plan["triggers"]          = triggers;
    plan["preserved_tokens"]  = params.preserved_tokens;
    plan["stops"]             = params.additional_stops;
    plan["thinking"]          = params.supports_thinking;
    plan["thinking_start"]    = params.thinking_start_tag;
    plan["thinking_ends"]     = params.thinking_end_tags;
    plan["operations"]        = budget.operations();
    plan["bytes"]             = budget.bytes();
    return plan.dump_safe();
}

std::string parse(const common_chat_parser_params & parser, const std::string & text, bool is_partial) {
    const velo::catch_aborts catching(VELO_FAILED);
    common_chat_msg          message;
    try {
        message = common_chat_parse(text, is_partial, parser);
    } catch (const std::runtime_error & error) { // the parser's refusal, which quotes nothing of the answer
        velo::fail(VELO_FAILED, "the answer is not in the model's format: %.500s", error.what());
    }
    common_json calls = common_json::array();
    for (const common_chat_tool_call & call : message.tool_calls) {
        calls.push_back({{"id", call.id}, {"name", call.name}, {"arguments", call.arguments}});
    }
    common_json found   = common_json::object();
    found["content"]    = message.content;
    found["reasoning"]  = message.reasoning_content;
    found["tool_calls"] = calls;
    return found.dump_safe();
}

} // namespace

velo_status velo_chat_template_new(const char * source, size_t source_len, const char * bos, size_t bos_len,
                                   const char * eos, size_t eos_len, velo_chat_template ** chat) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(chat, "chat");
        *chat = nullptr;
        velo::check_pointer(source, "source");
        velo::check_pointer(bos, "bos");
        velo::check_pointer(eos, "eos");
        if (source_len == 0 || source_len > max_source) {
            velo::fail(VELO_INVALID, "the chat template has %zu bytes, but must have from 1 to %zu", source_len,
                       max_source);
        }
        auto made = std::make_unique<velo_chat_template>();
        with_limits("the chat template cannot be used", 0, [&](velo::chat_budget &) {
            made->templates = common_chat_templates_init(nullptr, std::string(source, source_len),
                                                         std::string(bos, bos_len), std::string(eos, eos_len));
        });
        *chat = made.release();
    });
}

void velo_chat_template_free(velo_chat_template * chat) noexcept {
    if (chat) { // a deep template needs a deep stack; without one it is leaked
        velo::guarded([&] { velo::on_big_stack(big_stack, [&] { delete chat; }); });
    }
}

velo_status velo_chat_plan_new(const velo_chat_template * chat, const char * request, size_t request_len,
                               velo_chat_plan ** plan) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(plan, "plan");
        *plan = nullptr;
        velo::check_pointer(chat, "chat");
        auto made = std::make_unique<velo_chat_plan>();
        with_limits("the chat template refuses", request_len, [&](velo::chat_budget & budget) {
            const common_json        asked  = read_request(request, request_len);
            const auto               inputs = inputs_of(asked);
            const common_chat_params params = common_chat_templates_apply(chat->templates.get(), inputs);
            made->parser                    = common_chat_parser_params(params);
            made->parser.reasoning_format   = inputs.reasoning_format;
            made->parser.parse_tool_calls   = inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE;
            if (!params.parser.empty()) {
                made->parser.parser.load(params.parser);
            }
            made->json = describe(params, budget);
        });
        *plan = made.release();
    });
}

void velo_chat_plan_free(velo_chat_plan * plan) noexcept { delete plan; }

velo_status velo_chat_plan_get(const velo_chat_plan * plan, char * json, size_t capacity, size_t * len) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(plan, "plan");
        velo::put_text(plan->json, json, capacity, len);
    });
}

velo_status velo_chat_parse(const velo_chat_plan * plan, const char * text, size_t text_len, int32_t is_partial,
                            char * json, size_t capacity, size_t * len) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(plan, "plan");
        velo::check_array(text, static_cast<int64_t>(text_len), "text");
        const std::string answer(text_len ? text : "", text_len);
        const size_t      levels = count_openers(answer);
        std::string       found;
        if (levels <= small_stack) {
            found = parse(plan->parser, answer, is_partial != 0);
        } else { // the parser recurses through nested JSON
            velo::on_big_stack(levels * stack_a_level, [&] { found = parse(plan->parser, answer, is_partial != 0); });
        }
        velo::put_text(found, json, capacity, len);
    });
}
