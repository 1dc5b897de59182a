// Memory of the pool: tensors that one layer of each group uses, in place of the memory of upstream's caches.

#include "llama-paged-hooks.h"
#include "paged-state.h"

#include "llama-cpp.h"

#include <algorithm>
#include <map>
#include <set>

using access = llama_paged_access;

[[noreturn]] static void invalid(const std::string & what) { paged_fail(LLAMA_PAGED_INVALID, what); }

static int32_t group_of_layer(const llama_paged & paged, uint32_t il) {
    if (!paged.params.layer_groups) {
        return 0;
    }
    if (il >= paged.params.n_layer_groups) {
        invalid("layer_groups has " + std::to_string(paged.params.n_layer_groups) + " entries, none for layer " +
                std::to_string(il));
    }
    const int32_t group = paged.params.layer_groups[il];
    if (group < 0 || group >= (int32_t) paged.params.n_layer_groups) {
        invalid("layer " + std::to_string(il) + " is in group " + std::to_string(group) + "; groups count from 0");
    }
    return group;
}

// Find the groups of a cache's layers.
static void set_groups(const llama_paged & paged, llama_paged_cache & cache) {
    std::set<int32_t> groups;
    for (const access::layer & l : access::layers(*cache.cache)) {
        groups.insert(group_of_layer(paged, l.il));
    }
    cache.groups.assign(groups.begin(), groups.end());
    for (const access::layer & l : access::layers(*cache.cache)) {
        cache.group_of.push_back((int32_t) std::distance(groups.begin(), groups.find(group_of_layer(paged, l.il))));
    }
}

// Count the groups of all caches.
static int32_t count_groups(const llama_paged & paged) {
    std::set<int32_t> groups;
    for (const llama_paged_cache & cache : paged.caches) {
        groups.insert(cache.groups.begin(), cache.groups.end());
    }
    const int32_t n_groups = (int32_t) groups.size();
    if (n_groups > 0 && *groups.rbegin() != n_groups - 1) {
        invalid("layer_groups names group " + std::to_string(*groups.rbegin()) + ", but only " +
                std::to_string(n_groups) + " groups have a layer");
    }
    return n_groups;
}

// The storages on one device, and how many of them each group uses.
struct device_pool {
    std::vector<size_t>       storages; // indices in llama_paged::storages
    std::map<int32_t, size_t> n_used;   // by group
};

using device_pools = std::map<ggml_backend_buffer_type_t, device_pool>;

static bool same_rows(const ggml_tensor * a, const ggml_tensor * b) {
    return (!a && !b) || (a && b && a->type == b->type && a->ne[0] == b->ne[0]);
}

// Return the storage of a layer: the next one of its device that its group does not use. A new storage has the
// layer's own tensors, which show its type and its rows.
static size_t storage_of(llama_paged & paged, device_pool & pool, int32_t group, const access::layer & l) {
    const size_t n = pool.n_used[group]++;
    if (n == pool.storages.size()) {
        pool.storages.push_back(paged.storages.size());
        paged.storages.push_back({(int32_t) l.il, l.k, l.v});
    }
    const paged_storage & storage = paged.storages[pool.storages[n]];
    if (!same_rows(storage.k, l.k) || !same_rows(storage.v, l.v)) {
        invalid("layers " + std::to_string(storage.layer) + " and " + std::to_string(l.il) +
                " share the memory of a block, but their rows of K or V differ");
    }
    return pool.storages[n];
}

// Allocate the storages of a device; the first cache owns them.
static void allocate(llama_paged & paged, ggml_backend_buffer_type_t buft, const device_pool & pool) {
    const ggml_init_params params = {2 * pool.storages.size() * ggml_tensor_overhead(), nullptr, true};
    ggml_context_ptr       ctx(ggml_init(params));
    if (!ctx) {
        throw std::bad_alloc();
    }
    for (const size_t i : pool.storages) {
        for (ggml_tensor ** t : {&paged.storages[i].k, &paged.storages[i].v}) {
            if (*t) {
                const std::string name = (*t)->name;
                *t                     = ggml_new_tensor_3d(ctx.get(), (*t)->type, (*t)->ne[0], paged.n_slots(), 1);
                ggml_set_name(*t, name.c_str());
            }
        }
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft);
    if (!buffer) {
        paged_fail(LLAMA_PAGED_NO_MEMORY, "no memory for a pool of " + std::to_string(paged.params.n_blocks) +
                                              " blocks on " + ggml_backend_buft_name(buft));
    }
    llama_paged_clear(buffer);
    access::buffers(*paged.caches.front().cache).emplace_back(std::move(ctx), buffer);
}

void paged_make_slots(llama_paged & paged) {
    if (paged.params.slot_bytes == 0) {
        invalid("the model has no layer with a cache, so slot_bytes must be at least 1");
    }
    paged.slots.reset(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    if (!paged.slots) {
        throw std::bad_alloc();
    }
    ggml_tensor * k = ggml_new_tensor_2d(paged.slots.get(), GGML_TYPE_I8, paged.params.slot_bytes, paged.n_slots());
    paged.slots_memory.reset(
        ggml_backend_alloc_ctx_tensors_from_buft(paged.slots.get(), ggml_backend_cpu_buffer_type()));
    if (!paged.slots_memory) {
        paged_fail(LLAMA_PAGED_NO_MEMORY,
                   "no memory for a pool of " + std::to_string(paged.params.n_blocks) + " blocks");
    }
    paged.storages = {{-1, k, nullptr}};
    paged.n_groups = 1;
}

void paged_make_pool(llama_paged & paged) {
    device_pools                     devices;
    std::vector<std::vector<size_t>> chosen; // by cache and layer
    for (llama_paged_cache & cache : paged.caches) {
        set_groups(paged, cache);
        chosen.emplace_back();
        for (const access::layer & l : access::layers(*cache.cache)) {
            const int32_t group = cache.groups[cache.group_of[chosen.back().size()]];
            chosen.back().push_back(storage_of(paged, devices[ggml_backend_buffer_get_type(l.k->buffer)], group, l));
        }
    }
    paged.n_groups = count_groups(paged);
    std::vector<std::decay_t<decltype(access::buffers(*paged.caches.front().cache))>> upstreams; // freed at the end
    for (const llama_paged_cache & cache : paged.caches) {
        upstreams.push_back(std::move(access::buffers(*cache.cache)));
        access::buffers(*cache.cache).clear();
    }
    for (const auto & [buft, pool] : devices) {
        allocate(paged, buft, pool);
    }
    for (size_t c = 0; c < chosen.size(); ++c) {
        auto & layers = access::layers(*paged.caches[c].cache);
        for (size_t i = 0; i < layers.size(); ++i) {
            const paged_storage & storage = paged.storages[chosen[c][i]];
            layers[i].k                   = storage.k;
            layers[i].v                   = storage.v;
            layers[i].k_stream            = {storage.k};
            layers[i].v_stream            = {storage.v};
        }
    }
}
