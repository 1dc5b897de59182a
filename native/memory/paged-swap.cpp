// Swap blocks between the pool and host memory.

#include "paged-blocks.h"
#include "paged-state.h"
#include "swap-memory.h"

#include <algorithm>
#include <cstring>

// Open a stream for each device with pools. If a device has no second stream, its copies are synchronous.
static void open_lanes(paged_swap & swap, const llama_paged & paged) {
    for_each_pool(paged, [&](const ggml_tensor * pool) {
        const ggml_backend_dev_t device = pool_device(pool);
        if (ggml_backend_buffer_is_host(pool->buffer) || !device || swap.stream_of(pool)) {
            return;
        }
        if (ggml_backend_ptr stream{ggml_backend_dev_init(device, nullptr)}) {
            swap.lanes.push_back({device, std::move(stream)});
        }
    });
}

// Allocate pinned memory, or plain memory (slower copies) if pinned memory is not available.
static void allocate_swap(paged_swap & swap, size_t size) {
    for (const paged_swap::lane & l : swap.lanes) {
        const ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(l.device);
        swap.pinned.reset(buft ? ggml_backend_buft_alloc_buffer(buft, size) : nullptr);
        if (swap.pinned) {
            swap.base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(swap.pinned.get()));
            return;
        }
    }
    swap.plain.reset(static_cast<uint8_t *>(malloc(size)));
    swap.base = swap.plain.get();
    if (!swap.base) {
        paged_fail(LLAMA_PAGED_NO_MEMORY, "no memory for " + std::to_string(swap.n_blocks) +
                                              " swapped blocks, which need " + std::to_string(size) +
                                              " bytes: use a smaller swap_bytes");
    }
}

void paged_open_swap(llama_paged & paged) {
    const uint32_t n_blocks = paged.params.n_swap_blocks;
    if (n_blocks == 0) {
        return;
    }
    auto swap      = std::make_unique<paged_swap>();
    swap->n_blocks = n_blocks;
    open_lanes(*swap, paged);
    allocate_swap(*swap, n_blocks * paged_block_bytes(paged));
    paged.swap = std::move(swap);
}

void paged_check_swap_blocks(const llama_paged & paged, const int32_t * swap_blocks, int32_t n) {
    const uint32_t n_swap_blocks = paged.swap ? paged.swap->n_blocks : 0;
    if (n > 0 && !swap_blocks) {
        paged_fail(LLAMA_PAGED_INVALID, "the list of swapped blocks is null");
    }
    for (int32_t i = 0; i < n; ++i) {
        if (swap_blocks[i] < 0 || (uint32_t) swap_blocks[i] >= n_swap_blocks) {
            paged_fail(LLAMA_PAGED_INVALID, "swapped block " + std::to_string(swap_blocks[i]) +
                                                " does not exist; there are " + std::to_string(n_swap_blocks));
        }
    }
}

// Call f(pool, stream or null, offset in the pool, host memory, bytes) for runs of blocks that are neighbours in the
// pool and in host memory, and wait for the copies.
template <typename F>
static void copy_runs(const llama_paged & paged, const int32_t * blocks, const int32_t * swap_blocks, int32_t n,
                      F && f) {
    const paged_swap & swap   = *paged.swap;
    uint8_t *          memory = swap.base;
    for_each_pool(paged, [&](ggml_tensor * pool) {
        const size_t         size   = paged_block_bytes(paged, pool);
        const ggml_backend_t stream = swap.stream_of(pool);
        for_each_run(blocks, swap_blocks, n, [&](int32_t block, int32_t swap_block, size_t length) {
            f(pool, stream, block * size, memory + swap_block * size, length * size);
        });
        memory += swap.n_blocks * size;
    });
    for (const paged_swap::lane & l : swap.lanes) { // the next step reads or overwrites the copied blocks
        ggml_backend_synchronize(l.stream.get());
    }
}

// Check the blocks, wait for the last step, and copy.
template <typename F>
static llama_paged_status copy_swapped(llama_context * ctx, const int32_t * blocks, const int32_t * swap_blocks,
                                       int32_t n, F && f) {
    return paged_guard([&] {
        const llama_paged & paged = paged_of(ctx);
        paged_check_blocks(paged, blocks, n);
        paged_check_swap_blocks(paged, swap_blocks, n);
        if (n > 0) {
            ctx->synchronize();
            copy_runs(paged, blocks, swap_blocks, n, f);
        }
    });
}

llama_paged_status llama_paged_swap_out(llama_context * ctx, const int32_t * blocks, const int32_t * swap_blocks,
                                        int32_t n) {
    return copy_swapped(ctx, blocks, swap_blocks, n,
                        [](ggml_tensor * pool, ggml_backend_t stream, size_t at, uint8_t * to, size_t size) {
                            if (stream) {
                                ggml_backend_tensor_get_async(stream, pool, to, at, size);
                            } else {
                                ggml_backend_tensor_get(pool, to, at, size);
                            }
                        });
}

llama_paged_status llama_paged_swap_in(llama_context * ctx, const int32_t * swap_blocks, const int32_t * blocks,
                                       int32_t n) {
    return copy_swapped(ctx, blocks, swap_blocks, n,
                        [](ggml_tensor * pool, ggml_backend_t stream, size_t at, const uint8_t * from, size_t size) {
                            if (stream) {
                                ggml_backend_tensor_set_async(stream, pool, from, at, size);
                            } else {
                                ggml_backend_tensor_set(pool, from, at, size);
                            }
                        });
}
