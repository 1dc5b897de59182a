#pragma once

#include "late-weights.h"
#include "mapped-files.hpp"

namespace velo {

// While an object exists, the loader on this thread registers its mappings with `files` (NULL: not at all) and leaves
// weights to be packed later.
struct load_watch : llama_load_watch {
    explicit load_watch(mapped_files * files) {
        if (files) {
            mapped = [=](const void * data, size_t size) { files->add_mapping(data, size); };
        }
        llama_watch_load(this);
    }
    ~load_watch() { llama_watch_load(nullptr); }
    load_watch(const load_watch &)             = delete;
    load_watch & operator=(const load_watch &) = delete;
};

} // namespace velo
