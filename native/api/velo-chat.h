// velo-chat.h: chat formats of velo.h: the grammar and the parser of a model's tool calls and reasoning, which upstream
// derives from the model's chat template. Rules and errors: velo.h.
//
// Requests and results are JSON in UTF-8. A template is limited in operations, memory, depth and time, so that none
// ends the process.
#ifndef VELO_CHAT_H
#define VELO_CHAT_H

#include "velo.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct velo_chat_template velo_chat_template;
typedef struct velo_chat_plan     velo_chat_plan;

// Compile a chat template. bos, eos: texts of the model's tokens. A template that cannot be used is VELO_INVALID.
VELO_API velo_status velo_chat_template_new(const char * source, size_t source_len, const char * bos, size_t bos_len,
                                            const char * eos, size_t eos_len, velo_chat_template ** chat) VELO_NOEXCEPT;
VELO_API void        velo_chat_template_free(velo_chat_template * chat) VELO_NOEXCEPT;

// Derive the plan of one answer. Any number of threads may use a template at once. The request is an object with
//   messages, tools           as in OpenAI's interface
//   tool_choice               "auto", "none" or "required"
//   parallel_tool_calls       whether the grammar allows several calls
//   reasoning                 whether reasoning is kept apart from the content
//   enable_thinking           variable of the template
//   add_generation_prompt     whether the template begins the answer
//   arguments                 other variables of the template
// All but messages may be absent.
VELO_API velo_status velo_chat_plan_new(const velo_chat_template * chat, const char * request, size_t request_len,
                                        velo_chat_plan ** plan) VELO_NOEXCEPT;
VELO_API void        velo_chat_plan_free(velo_chat_plan * plan) VELO_NOEXCEPT;

// Write the plan as an object with
//   prompt                    as upstream renders it
//   generation_prompt         end of the prompt that begins the answer
//   grammar                   GBNF; empty: none
//   grammar_lazy              whether the grammar applies from a trigger on
//   triggers                  list of {type: "word", "pattern", "pattern_full" or "token", value}
//   preserved_tokens          control tokens whose names the parser reads
//   stops                     strings that end the answer
//   thinking                  whether the model reasons
//   thinking_start            mark that begins reasoning; empty: not known
//   thinking_ends             marks that end it
//   operations, bytes         work of the template engine
VELO_API velo_status velo_chat_plan_get(const velo_chat_plan * plan, char * json, size_t capacity,
                                        size_t * len) VELO_NOEXCEPT;

// Parse an answer, or its beginning if is_partial is not 0. Writes an object with content, reasoning and tool_calls, a
// list of {id, name, arguments}. An answer that the plan's parser does not accept is VELO_FAILED. Any number of threads
// may use a plan at once.
VELO_API velo_status velo_chat_parse(const velo_chat_plan * plan, const char * text, size_t text_len,
                                     int32_t is_partial, char * json, size_t capacity, size_t * len) VELO_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif
