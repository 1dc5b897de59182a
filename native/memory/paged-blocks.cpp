// Copy, read, write and fill whole blocks over all layers; sizes of the allocations.

#include "paged-blocks.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

size_t paged_block_bytes(const llama_paged & paged, const ggml_tensor * pool) {
    return paged.params.block_size * pool->nb[1];
}

size_t paged_block_bytes(const llama_paged & paged) {
    size_t total = 0;
    for_each_pool(paged, [&](const ggml_tensor * pool) { total += paged_block_bytes(paged, pool); });
    return total;
}

void paged_check_blocks(const llama_paged & paged, const int32_t * blocks, int32_t n) {
    if (n < 0 || (n > 0 && !blocks)) {
        paged_fail(LLAMA_PAGED_INVALID, "the list of blocks is null or has the negative length " + std::to_string(n));
    }
    for (int32_t i = 0; i < n; ++i) {
        if (blocks[i] < 0 || (uint32_t) blocks[i] >= paged.params.n_blocks) {
            paged_fail(LLAMA_PAGED_INVALID, "block " + std::to_string(blocks[i]) + " is not in the pool of " +
                                                std::to_string(paged.params.n_blocks) + " blocks");
        }
    }
}

static void check_buffer(const llama_paged & paged, int32_t n, const void * data, size_t size) {
    const size_t need = n * paged_block_bytes(paged);
    if (size != need || (need > 0 && !data)) {
        paged_fail(LLAMA_PAGED_INVALID, "the buffer has " + std::to_string(size) + " bytes; " + std::to_string(n) +
                                            " blocks need " + std::to_string(need));
    }
}

// A range of a pool as a tensor of bytes, for the backends' copies.
static ggml_tensor bytes_of(ggml_tensor * pool, size_t at, size_t size) {
    ggml_tensor view = *pool;
    view.type        = GGML_TYPE_I8;
    view.op          = GGML_OP_VIEW;
    view.view_src    = pool;
    view.view_offs   = at;
    view.data        = static_cast<uint8_t *>(pool->data) + at;
    std::fill_n(view.ne, GGML_MAX_DIMS, 1);
    std::fill_n(view.nb, GGML_MAX_DIMS, size);
    view.ne[0] = (int64_t) size;
    view.nb[0] = 1;
    return view;
}

// A device copies its own pools, in the order of its computations.
static void copy_bytes(llama_context & ctx, ggml_tensor * pool, size_t from, size_t to, size_t size) {
    if (ggml_backend_buffer_is_host(pool->buffer)) {
        auto * data = static_cast<uint8_t *>(pool->data);
        memmove(data + to, data + from, size);
        return;
    }
    ggml_tensor source = bytes_of(pool, from, size), target = bytes_of(pool, to, size);
    if (ggml_backend_t backend = paged_backend_of(llama_paged_access::sched(ctx), pool)) {
        ggml_backend_tensor_copy_async(backend, backend, &source, &target);
    } else {
        ggml_backend_tensor_copy(&source, &target);
    }
}

// Copy a run of neighbouring blocks; block by block if source and target overlap.
static void copy_run(llama_context & ctx, const llama_paged & paged, ggml_tensor * pool, int32_t src, int32_t dst,
                     size_t length) {
    const size_t size = paged_block_bytes(paged, pool);
    if (src == dst) {
        return;
    }
    const size_t step = (size_t) std::abs(src - dst) >= length ? length : 1;
    for (size_t i = 0; i < length; i += step) {
        copy_bytes(ctx, pool, (src + i) * size, (dst + i) * size, step * size);
    }
}

llama_paged_status llama_paged_copy(llama_context * ctx, const int32_t * src, const int32_t * dst, int32_t n) {
    return paged_guard([&] {
        const llama_paged & paged = paged_of(ctx);
        paged_check_blocks(paged, src, n);
        paged_check_blocks(paged, dst, n);
        ctx->synchronize();
        for_each_pool(paged, [&](ggml_tensor * pool) {
            for_each_run(src, dst, n, [&](int32_t from, int32_t to, size_t length) {
                copy_run(*ctx, paged, pool, from, to, length);
            });
        });
    });
}

// Call f(pool, offset in the pool, offset in the caller's buffer, size) for every block of every pool.
template <typename F> static void for_each_block(const llama_paged & paged, const int32_t * blocks, int32_t n, F && f) {
    const size_t stride = paged_block_bytes(paged);
    size_t       offset = 0;
    for_each_pool(paged, [&](ggml_tensor * pool) {
        const size_t size = paged_block_bytes(paged, pool);
        for (int32_t i = 0; i < n; ++i) {
            f(pool, blocks[i] * size, i * stride + offset, size);
        }
        offset += size;
    });
}

llama_paged_status llama_paged_read(llama_context * ctx, const int32_t * blocks, int32_t n, void * data, size_t size) {
    return paged_guard([&] {
        const llama_paged & paged = paged_of(ctx);
        paged_check_blocks(paged, blocks, n);
        check_buffer(paged, n, data, size);
        ctx->synchronize();
        for_each_block(paged, blocks, n, [&](ggml_tensor * pool, size_t at, size_t to, size_t bytes) {
            ggml_backend_tensor_get(pool, static_cast<uint8_t *>(data) + to, at, bytes);
        });
    });
}

llama_paged_status llama_paged_write(llama_context * ctx, const int32_t * blocks, int32_t n, const void * data,
                                     size_t size) {
    return paged_guard([&] {
        const llama_paged & paged = paged_of(ctx);
        paged_check_blocks(paged, blocks, n);
        check_buffer(paged, n, data, size);
        ctx->synchronize();
        for_each_block(paged, blocks, n, [&](ggml_tensor * pool, size_t at, size_t from, size_t bytes) {
            ggml_backend_tensor_set(pool, static_cast<const uint8_t *>(data) + from, at, bytes);
        });
    });
}

llama_paged_status llama_paged_fill(llama_context * ctx, const int32_t * blocks, int32_t n, uint8_t byte) {
    return paged_guard([&] {
        const llama_paged & paged = paged_of(ctx);
        paged_check_blocks(paged, blocks, n);
        ctx->synchronize();
        for_each_block(paged, blocks, n, [&](ggml_tensor * pool, size_t at, size_t, size_t bytes) {
            ggml_backend_tensor_memset(pool, byte, at, bytes);
        });
    });
}

llama_paged_status llama_paged_get_info(llama_context * ctx, llama_paged_info * info) {
    return paged_guard([&] {
        const llama_paged & paged = paged_of(ctx);
        if (!info) {
            paged_fail(LLAMA_PAGED_INVALID, "info is null");
        }
        *info             = {};
        info->n_blocks    = paged.params.n_blocks;
        info->block_size  = paged.params.block_size;
        info->block_bytes = paged_block_bytes(paged);
        info->n_groups    = (uint32_t) paged.n_groups;
        info->n_storages  = (uint32_t) paged.storages.size();
        for (const llama_paged_cache & cache : paged.caches) {
            info->pool_bytes += llama_paged_access::bytes(*cache.cache);
        }
        if (paged.slots_memory) {
            info->pool_bytes += ggml_backend_buffer_get_size(paged.slots_memory.get());
        }
        if (paged.states) {
            info->n_states = llama_paged_access::cparams(*ctx).n_seq_max;
            for (const auto & [buft, bytes] : paged.states->memory_breakdown()) {
                info->state_bytes += bytes;
            }
        }
        info->compute_bytes = llama_paged_access::compute_bytes(*ctx);
        info->output_bytes  = llama_paged_access::output_bytes(*ctx);
    });
}

llama_paged_status llama_paged_get_storage(llama_context * ctx, uint32_t i, llama_paged_storage * storage) {
    return paged_guard([&] {
        const llama_paged & paged = paged_of(ctx);
        if (!storage) {
            paged_fail(LLAMA_PAGED_INVALID, "storage is null");
        }
        if (i >= paged.storages.size()) {
            paged_fail(LLAMA_PAGED_INVALID, "storage " + std::to_string(i) + " does not exist; there are " +
                                                std::to_string(paged.storages.size()));
        }
        const paged_storage & s = paged.storages[i];
        *storage                = {s.layer,
                                   (int32_t) s.k->type,
                                   (int32_t) (s.v ? s.v->type : s.k->type),
                                   (int32_t) s.k->ne[0],
                                   (int32_t) (s.v ? s.v->ne[0] : 0),
                                   (int64_t) s.k->nb[1],
                                   (int64_t) (s.v ? s.v->nb[1] : 0)};
    });
}
