// Print the launches of usual calls as JSON lines: scripts/build/cuda_report.py compiles and runs this with the bytes
// of shared memory that a thread block may have, and 1 if the card has the kernels for known types.
#include "paged-launch.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

using namespace paged;

std::string                               name_of(const half_numbers &) { return "half"; }
std::string                               name_of(const bfloat_numbers &) { return "bfloat"; }
std::string                               name_of(const float_numbers &) { return "float"; }
template <int TYPE, int SIZE> std::string name_of(const known_numbers<TYPE, SIZE> &) {
    return std::to_string(TYPE) + " " + std::to_string(SIZE);
}

struct printing_launcher {
    const char * call;
    bool         has_all; // cards from 8.0 on

    template <division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
    void attend(const params &, row_range, int tokens, int bytes) {
        constexpr int warps = kernel_threads<BY, M_TILES, V_TILES, KNumbers, VNumbers> / 32;
        printf("{\"call\": \"%s\", \"kernel\": [%d, %d, %d, \"%s\", \"%s\"], ", call, (int) BY, M_TILES, V_TILES,
               name_of(KNumbers()).c_str(), name_of(VNumbers()).c_str());
        printf("\"warps\": %d, \"tokens\": %d, \"bytes\": %d}\n", warps, tokens, bytes);
    }
    void merge(const params &) {}
    int  multiprocessors() const { return 1; } // the largest tiles
    bool has_all_kernels() const { return has_all; }

    template <class Which> bool attend_with(const params & p, int shared_bytes) {
        return launch_which<Which>(p, shared_bytes, *this);
    }
};

struct kv_type {
    const char * name;
    int          type;
};

// Print the launches of a call of 512 queries.
void print_launches(const std::string & name, params p, int shared_bytes, bool has_all) {
    p.n_head   = p.group * p.n_head_kv;
    p.n_tokens = 512, p.n_rows = p.end_row = 1, p.scale = 1.0f;
    set_block_size(p, 64);
    printing_launcher launcher = {name.c_str(), has_all};
    if (refusal(p, shared_bytes) == nullptr) {
        launch_part(p, shared_bytes, launcher);
    }
}

params heads_of(kv_type kv, int d) {
    const int row_bytes = d / CODED_NUMBERS * group_bytes(kv.type);
    params    p         = {};
    p.k = p.v = make_pages(nullptr, row_bytes, 8 * row_bytes, kv.type, row_bytes);
    p.d_k = p.d_v = d;
    p.n_head_kv = 8, p.group = 4;
    return p;
}

params latent_heads(bool fast) {
    const kv_type f16 = {"f16", PAGE_F16};
    params        p   = heads_of(f16, 576);
    p.d_v             = 512;
    p.n_head_kv = 1, p.group = 128;
    p.v_is_k = true;
    p.fast   = fast;
    return p;
}

} // namespace

int main(int argc, char ** argv) {
    const int  shared_bytes = argc > 1 ? atoi(argv[1]) : 0;
    const bool has_all      = argc > 2 && atoi(argv[2]) != 0;
    for (const kv_type kv : {kv_type{"f16", PAGE_F16}, kv_type{"q8_0", PAGE_Q8_0}, kv_type{"q4_0", PAGE_Q4_0},
                             kv_type{"q5_1", PAGE_Q5_1}, kv_type{"bf16", PAGE_BF16}, kv_type{"f32", PAGE_F32}}) {
        for (const int d : {64, 128, 256}) {
            print_launches(kv.name + (" " + std::to_string(d)), heads_of(kv, d), shared_bytes, has_all);
        }
    }
    print_launches("latent", latent_heads(false), shared_bytes, has_all);
    print_launches("latent, fast", latent_heads(true), shared_bytes, has_all);
    return 0;
}
