// Render a template with upstream's common/jinja. scripts/upstream/templates.py compares the result with ours.
//
//     jinja_lab TEMPLATE CONTEXT.json
//
// prints a line for each part of the text, 1 if it is marked as input, else 0, and its bytes in hexadecimal;
// or "error" and the message, in hexadecimal.
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "json.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>

extern "C" void ggml_abort(const char *, int, const char *, ...) { std::abort(); }

namespace {

std::string read(const char * path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void print(const char * kind, const std::string & text) {
    std::printf("%s ", kind);
    for (const unsigned char byte : text) {
        std::printf("%02x", byte);
    }
    std::printf("\n");
}

} // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        return 2;
    }
    try {
        jinja::lexer   lexer;
        const auto     tokens  = lexer.tokenize(read(argv[1]));
        const auto     program = jinja::parse_from_tokens(tokens);
        jinja::context context(tokens.source);
        jinja::global_from_json(context, common_json::parse(read(argv[2])), true);
        jinja::runtime runtime(context);
        const auto     text = jinja::runtime::gather_string_parts(runtime.execute(program));
        for (const auto & part : text->val_str.parts) {
            print(part.is_input ? "1" : "0", part.val);
        }
    } catch (const std::exception & error) {
        print("error", error.what());
    }
    return 0;
}
