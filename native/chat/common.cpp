// The functions of upstream's common.cpp and log.cpp that its chat sources call. The rest of those files needs the
// whole of common/: downloads, command lines, sampling.
#include "common.h"
#include "log.h"

#include <cctype>
#include <stdexcept>

std::string string_join(const std::vector<std::string> & values, const std::string & separator) {
    std::string joined;
    for (size_t i = 0; i < values.size(); ++i) {
        joined.append(i > 0 ? separator : "").append(values[i]);
    }
    return joined;
}

std::vector<std::string> string_split(const std::string & str, const std::string & delimiter) {
    std::vector<std::string> parts;
    size_t                   from = 0;
    for (size_t at; (at = str.find(delimiter, from)) != std::string::npos && !delimiter.empty();) {
        parts.push_back(str.substr(from, at - from));
        from = at + delimiter.size();
    }
    parts.push_back(str.substr(from));
    return parts;
}

std::string string_strip(const std::string & str) {
    size_t begin = 0;
    size_t end   = str.size();
    while (begin < end && std::isspace(static_cast<unsigned char>(str[begin]))) {
        ++begin;
    }
    while (end > begin && std::isspace(static_cast<unsigned char>(str[end - 1]))) {
        --end;
    }
    return str.substr(begin, end - begin);
}

std::string string_repeat(const std::string & str, size_t n) {
    std::string repeated;
    repeated.reserve(str.size() * n);
    while (n-- > 0) {
        repeated += str;
    }
    return repeated;
}

void string_replace_all(std::string & s, const std::string & search, const std::string & replace) {
    if (search.empty()) {
        return;
    }
    std::string changed;
    size_t      from = 0;
    for (size_t at; (at = s.find(search, from)) != std::string::npos; from = at + search.size()) {
        changed.append(s, from, at - from).append(replace);
    }
    s = changed.append(s, from, std::string::npos);
}

std::vector<llama_token> common_tokenize(const llama_vocab *, const std::string &, bool, bool) {
    throw std::logic_error("chat formats have no vocabulary");
}

std::string common_token_to_piece(const llama_vocab *, llama_token, bool) {
    throw std::logic_error("chat formats have no vocabulary");
}

int common_log_get_verbosity_thold() { return -1; } // below every message, so that none is made

common_log * common_log_main() { return nullptr; }

void common_log_add(common_log *, ggml_log_level, const char *, ...) {}
