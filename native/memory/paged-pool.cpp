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

// The storages on one device, and how many of its layers each group has.
struct device_pool {
    std::vector<size_t>        storages;     // indices in llama_paged::storages
    std::map<int32_t, int32_t> n_layers;     // by group
    std::map<int32_t, int32_t> n_shares;     // of each group
    access::layer              longest = {}; // of the model
};

using device_pools = std::map<ggml_backend_buffer_type_t, device_pool>;

static int64_t row_of(const ggml_tensor * t) { return t ? t->ne[0] : 0; }

// Return how many rows of a layer are as long as the longest ones.
static int32_t shares_of(const device_pool & pool, const access::layer & l) {
    const int64_t n     = row_of(pool.longest.k) / row_of(l.k);
    const bool    whole = n * row_of(l.k) == row_of(pool.longest.k) && n * row_of(l.v) == row_of(pool.longest.v);
    if (!whole || pool.longest.k->type != l.k->type) {
        invalid("layers " + std::to_string(pool.longest.il) + " and " + std::to_string(l.il) +
                " share the memory of a block, but their rows of K or V are no multiples");
    }
    return (int32_t) n;
}

// Add the next layer of a cache to its part. A layer without heads computes no attention and needs none.
static void add_to_part(llama_paged_cache & cache, uint32_t il, int32_t group, int32_t share) {
    const llama_hparams & hparams = access::hparams(*cache.cache);
    if (hparams.n_gqa(il) == 0) {
        cache.part_of.push_back(0);
        return;
    }
    const paged_part part  = {group, share, (int32_t) hparams.n_gqa(il), paged_has_window(hparams, il)};
    const auto       found = std::find(cache.parts.begin(), cache.parts.end(), part);
    cache.part_of.push_back((int32_t) (found - cache.parts.begin()));
    if (found == cache.parts.end()) {
        cache.parts.push_back(part);
    }
}

// Return the storage of a layer: the next one of its device that its group does not use. With one group, each layer has
// a storage with rows of its own; otherwise all have the longest rows of the model, and layers with shorter ones share
// a storage.
static size_t storage_of(llama_paged & paged, device_pool & pool, llama_paged_cache & cache, const access::layer & l) {
    const int32_t group = group_of_layer(paged, l.il);
    const int32_t n     = pool.n_layers[group]++;
    const bool    alone = paged.n_groups == 1;
    if (!alone && cache.n_shares != shares_of(pool, l)) {
        if (!cache.part_of.empty()) {
            invalid("layer " + std::to_string(l.il) + ": its rows are not as long as the ones of the layers before it");
        }
        cache.n_shares = shares_of(pool, l);
    }
    if (pool.n_shares.try_emplace(group, cache.n_shares).first->second != cache.n_shares) {
        invalid("layer " + std::to_string(l.il) +
                ": its rows are not as long as the ones of other layers of its group");
    }
    add_to_part(cache, l.il, group, n % cache.n_shares);
    const size_t i = n / cache.n_shares;
    if (i == pool.storages.size()) {
        const access::layer & rows = alone ? l : pool.longest;
        pool.storages.push_back(paged.storages.size());
        paged.storages.push_back({(int32_t) l.il, rows.k, rows.v});
    }
    return pool.storages[i];
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

// Return a storage's tensor as a layer with shorter rows sees it.
static ggml_tensor * view_of(llama_paged & paged, ggml_tensor * storage, int32_t n_shares) {
    if (!storage || n_shares == 1) {
        return storage;
    }
    paged.views.emplace_back(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    if (!paged.views.back()) {
        throw std::bad_alloc();
    }
    const size_t  row  = storage->nb[1] / n_shares;
    ggml_tensor * view = ggml_view_3d(paged.views.back().get(), storage, storage->ne[0] / n_shares,
                                      storage->ne[1] * n_shares, 1, row, row * storage->ne[1] * n_shares, 0);
    ggml_backend_view_init(view);
    return view;
}

// Find the devices, and the longest rows of the model.
static device_pools find_devices(const llama_paged & paged) {
    device_pools  devices;
    access::layer longest = {};
    for (const llama_paged_cache & cache : paged.caches) {
        for (const access::layer & l : access::layers(*cache.cache)) {
            devices[ggml_backend_buffer_get_type(l.k->buffer)];
            longest = row_of(l.k) > row_of(longest.k) ? l : longest;
        }
    }
    for (auto & [buft, pool] : devices) {
        pool.longest = longest;
    }
    return devices;
}

void paged_make_pool(llama_paged & paged) {
    device_pools                     devices = find_devices(paged);
    std::vector<std::vector<size_t>> chosen; // by cache and layer
    for (llama_paged_cache & cache : paged.caches) {
        set_groups(paged, cache);
    }
    paged.n_groups = count_groups(paged);
    for (llama_paged_cache & cache : paged.caches) {
        chosen.emplace_back();
        for (const access::layer & l : access::layers(*cache.cache)) {
            device_pool & pool = devices[ggml_backend_buffer_get_type(l.k->buffer)];
            chosen.back().push_back(storage_of(paged, pool, cache, l));
        }
    }
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
            layers[i].k                   = view_of(paged, storage.k, paged.caches[c].n_shares);
            layers[i].v                   = view_of(paged, storage.v, paged.caches[c].n_shares);
            layers[i].k_stream            = {layers[i].k};
            layers[i].v_stream            = {layers[i].v};
        }
    }
}
