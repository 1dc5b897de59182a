// Recurrent states: clear one, copy it to another one, and save it in blocks.
//
// Upstream serializes a state as a stream of bytes. Here the stream fills blocks: of each block, its part in each pool.

#include "paged-blocks.h"
#include "swap-memory.h"

#include "llama-io.h"

#include <algorithm>
#include <cstring>

// The bytes of a list of blocks as one stream.
struct block_stream {
    const llama_paged &        paged;
    const int32_t *            blocks;
    bool                       swapped;
    std::vector<ggml_tensor *> pools;
    size_t                     block = 0, pool = 0, offset = 0; // the next byte
    size_t                     n_bytes = 0;                     // before it

    block_stream(const llama_paged & paged, const int32_t * blocks, bool swapped)
        : paged(paged), blocks(blocks), swapped(swapped) {
        for_each_pool(paged, [&](ggml_tensor * each) { pools.push_back(each); });
    }

    // Return the host memory of a pool's blocks; null: they are on a device.
    uint8_t * memory() const {
        if (!swapped) {
            return ggml_backend_buffer_is_host(pools[pool]->buffer) ? static_cast<uint8_t *>(pools[pool]->data)
                                                                    : nullptr;
        }
        size_t before = 0;
        for (size_t i = 0; i < pool; ++i) {
            before += paged_block_bytes(paged, pools[i]);
        }
        return paged.swap->base + before * paged.swap->n_blocks;
    }

    // Call f(memory or null, offset in the pool, number of bytes done before, bytes) for the next bytes, in parts.
    template <typename F> void next(size_t size, F && f) {
        for (size_t done = 0; done < size;) {
            const size_t whole = paged_block_bytes(paged, pools[pool]);
            const size_t part  = std::min(size - done, whole - offset);
            f(memory(), blocks[block] * whole + offset, done, part);
            done += part;
            n_bytes += part;
            offset += part;
            if (offset == whole) {
                offset = 0;
                pool   = (pool + 1) % pools.size();
                block += pool == 0;
            }
        }
    }
};

struct block_writer : llama_io_write_i {
    block_stream         stream;
    std::vector<uint8_t> copy; // of bytes that go from one device to another

    explicit block_writer(const block_stream & stream) : stream(stream) {}

    void write(const void * src, size_t size) override {
        stream.next(size, [&](uint8_t * memory, size_t at, size_t done, size_t bytes) {
            const auto * from = static_cast<const uint8_t *>(src) + done;
            if (memory) {
                memcpy(memory + at, from, bytes);
            } else {
                ggml_backend_tensor_set(stream.pools[stream.pool], from, at, bytes);
            }
        });
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (ggml_backend_buffer_is_host(tensor->buffer)) {
            write(static_cast<const uint8_t *>(tensor->data) + offset, size);
            return;
        }
        copy.resize(size);
        ggml_backend_tensor_get(tensor, copy.data(), offset, size);
        write(copy.data(), size);
    }

    size_t n_bytes() override { return stream.n_bytes; }
};

struct block_reader : llama_io_read_i {
    block_stream         stream;
    std::vector<uint8_t> copy;

    explicit block_reader(const block_stream & stream) : stream(stream) {}

    void read(void * dst, size_t size) override {
        stream.next(size, [&](const uint8_t * memory, size_t at, size_t done, size_t bytes) {
            auto * to = static_cast<uint8_t *>(dst) + done;
            if (memory) {
                memcpy(to, memory + at, bytes);
            } else {
                ggml_backend_tensor_get(stream.pools[stream.pool], to, at, bytes);
            }
        });
    }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (ggml_backend_buffer_is_host(tensor->buffer)) {
            read(static_cast<uint8_t *>(tensor->data) + offset, size);
            return;
        }
        copy.resize(size);
        read(copy.data(), size);
        ggml_backend_tensor_set(tensor, copy.data(), offset, size);
    }

    size_t n_bytes() override { return stream.n_bytes; }
};

static size_t saved_bytes(const llama_memory_recurrent & states) {
    constexpr size_t head  = 32; // upstream writes fewer bytes before each tensor, and before all of them
    size_t           total = 0;
    for (const auto * tensors : {&states.r_l, &states.s_l, &states.p_l}) {
        for (const ggml_tensor * tensor : *tensors) {
            total += tensor ? head + tensor->nb[1] : 0; // a row for each state
        }
    }
    return total > 0 ? total + head : 0;
}

int64_t llama_paged_state_bytes(const llama_model * model) {
    int64_t bytes = 0;
    paged_guard([&] {
        const llama_memory_ptr memory = paged_small_memory(*model);
        const paged_caches     parts  = paged_caches_of(memory.get(), *model);
        bytes                         = parts.states ? (int64_t) saved_bytes(*parts.states) : 0;
    });
    return bytes;
}

uint32_t paged_state_blocks(const llama_paged & paged) {
    const size_t block = paged_block_bytes(paged);
    return (uint32_t) ((saved_bytes(*paged.states) + block - 1) / block);
}

static void check_state(const llama_context & ctx, int32_t state) {
    const uint32_t n_states = ctx.get_cparams().n_seq_max;
    if (state < 0 || (uint32_t) state >= n_states) {
        paged_fail(LLAMA_PAGED_INVALID, "recurrent state " + std::to_string(state) + " does not exist; there are " +
                                            std::to_string(n_states));
    }
}

llama_paged_status llama_paged_clear_state(llama_context * ctx, int32_t state) {
    return paged_guard([&] {
        const llama_paged & paged = paged_of(ctx);
        if (!paged.states) {
            return;
        }
        check_state(*ctx, state);
        ctx->synchronize();
        paged.states->seq_rm(state, -1, -1);
    });
}

// Return the paged mode of a context whose model has states.
static llama_paged & with_states(llama_context * ctx) {
    llama_paged & paged = paged_of(ctx);
    if (!paged.states) {
        paged_fail(LLAMA_PAGED_INVALID, "the model has no recurrent states");
    }
    return paged;
}

llama_paged_status llama_paged_copy_state(llama_context * ctx, int32_t src, int32_t dst) {
    return paged_guard([&] {
        const llama_paged & paged = with_states(ctx);
        check_state(*ctx, src);
        check_state(*ctx, dst);
        ctx->synchronize();
        paged.states->seq_rm(dst, -1, -1);
        paged.states->seq_cp(src, dst, -1, -1); // the next step that changes one of both copies it
    });
}

static void check_saved(const llama_paged & paged, const int32_t * blocks, int32_t n, bool swapped) {
    if (n != (int32_t) paged_state_blocks(paged)) {
        paged_fail(LLAMA_PAGED_INVALID, "a recurrent state takes " + std::to_string(paged_state_blocks(paged)) +
                                            " blocks, got " + std::to_string(n));
    }
    if (swapped) {
        paged_check_swap_blocks(paged, blocks, n);
    } else {
        paged_check_blocks(paged, blocks, n);
    }
}

// Check the state and the blocks, wait for the last step, and call f(states, bytes of the blocks).
template <typename F>
static llama_paged_status with_saved(llama_context * ctx, int32_t state, const int32_t * blocks, int32_t n,
                                     bool swapped, F && f) {
    return paged_guard([&] {
        const llama_paged & paged = with_states(ctx);
        check_state(*ctx, state);
        check_saved(paged, blocks, n, swapped);
        ctx->synchronize();
        f(*paged.states, block_stream(paged, blocks, swapped));
    });
}

llama_paged_status llama_paged_save_state(llama_context * ctx, int32_t state, const int32_t * blocks, int32_t n,
                                          bool swapped) {
    return with_saved(ctx, state, blocks, n, swapped, [&](llama_memory_recurrent & states, const block_stream & bytes) {
        block_writer writer(bytes);
        states.state_write(writer, state);
    });
}

llama_paged_status llama_paged_load_state(llama_context * ctx, int32_t state, const int32_t * blocks, int32_t n,
                                          bool swapped) {
    return with_saved(ctx, state, blocks, n, swapped, [&](llama_memory_recurrent & states, const block_stream & bytes) {
        block_reader reader(bytes);
        states.state_read(reader, state);
    });
}
