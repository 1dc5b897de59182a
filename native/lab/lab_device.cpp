#include "lab_device.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "paged-attn.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

// Device memory is protected: a read or write of the host without the device's functions ends the process.
namespace {

struct device_state;

struct buffer_state {
    device_state * device;
    uint8_t *      base;   // as tensors have it
    uint8_t *      inside; // the same memory, always accessible: the device's copies need no change of protection
    size_t         size;
};

struct device_state {
    std::string                 name;
    size_t                      total = 0, taken = 0;
    std::vector<buffer_state *> buffers;
    int                         n_open = 0;
    ggml_backend_buffer_type    buft{}, host{};
    ggml_backend_device         device{};
};

std::recursive_mutex                       mutex;
std::vector<std::unique_ptr<device_state>> devices;
lab_device_counts                          counts{};
std::atomic<int>                           exhausted{0}; // see lab_device_exhaust

// Device memory is accessible while an object exists: the device computes.
struct at_work {
    std::lock_guard<std::recursive_mutex> lock{mutex};

    at_work() { open(+1, PROT_READ | PROT_WRITE); }
    ~at_work() { open(-1, PROT_NONE); }

    static void open(int step, int protection) {
        for (const auto & d : devices) {
            const int before = d->n_open;
            d->n_open += step;
            if (before == 0 || d->n_open == 0) {
                for (const buffer_state * b : d->buffers) {
                    mprotect(b->base, b->size, protection);
                }
            }
        }
    }
};

// ---- memory ----

buffer_state * state_of(ggml_backend_buffer_t buffer) { return static_cast<buffer_state *>(buffer->context); }

void buffer_free(ggml_backend_buffer_t buffer) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    buffer_state *                              b = state_of(buffer);
    b->device->taken -= b->size;
    auto & all = b->device->buffers;
    all.erase(std::find(all.begin(), all.end(), b));
    munmap(b->base, b->size);
    munmap(b->inside, b->size);
    delete b;
}
void * buffer_base(ggml_backend_buffer_t buffer) { return state_of(buffer)->base; }

ggml_backend_buffer_t buffer_of(const ggml_tensor * t) { return t->view_src ? t->view_src->buffer : t->buffer; }

bool on_a_device(const ggml_tensor * t) { return buffer_of(t) && buffer_of(t)->iface.free_buffer == buffer_free; }

uint8_t * inside(const ggml_tensor * t, size_t offset = 0) {
    const buffer_state * b = state_of(buffer_of(t));
    return b->inside + (static_cast<uint8_t *>(t->data) - b->base) + offset;
}

void copy(void * to, const void * from, size_t size, int64_t & count) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    ++count;
    memcpy(to, from, size);
}

void buffer_memset(ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    memset(inside(t, offset), value, size);
}
void buffer_set(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    copy(inside(t, offset), data, size, counts.writes);
}
void buffer_get(ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    copy(data, inside(t, offset), size, counts.reads);
}
bool buffer_copy(ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    if (!on_a_device(src)) {
        return false;
    }
    copy(inside(dst), inside(src), ggml_nbytes(src), counts.copies);
    return true;
}
void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    memset(state_of(buffer)->inside, value, state_of(buffer)->size);
}

const char * buft_name(ggml_backend_buffer_type_t buft) {
    return static_cast<device_state *>(buft->context)->name.c_str();
}
size_t buft_alignment(ggml_backend_buffer_type_t) { return 128; }

ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    const at_work  open;
    device_state * d = static_cast<device_state *>(buft->context);
    size             = (size + 4095) / 4096 * 4096;
    if (d->taken + size > d->total) {
        return nullptr;
    }
    size              = std::max<size_t>(size, 4096);
    const int file    = memfd_create("lab-device", 0);
    void *    maps[2] = {MAP_FAILED, MAP_FAILED};
    if (file >= 0 && ftruncate(file, (off_t) size) == 0) {
        for (void *& map : maps) {
            map = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        }
    }
    close(file);
    if (maps[0] == MAP_FAILED || maps[1] == MAP_FAILED) {
        return nullptr;
    }
    ggml_backend_buffer_i iface = {};
    iface.free_buffer           = buffer_free;
    iface.get_base              = buffer_base;
    iface.memset_tensor         = buffer_memset;
    iface.set_tensor            = buffer_set;
    iface.get_tensor            = buffer_get;
    iface.cpy_tensor            = buffer_copy;
    iface.clear                 = buffer_clear;
    d->taken += size;
    d->buffers.push_back(new buffer_state{d, static_cast<uint8_t *>(maps[0]), static_cast<uint8_t *>(maps[1]), size});
    return ggml_backend_buffer_init(buft, iface, d->buffers.back(), size);
}

const char * host_name(ggml_backend_buffer_type_t) { return "LabPinned"; }
bool         host_is_host(ggml_backend_buffer_type_t) { return true; }
void         host_free(ggml_backend_buffer_t buffer) {
    counts.pinned -= (int64_t) buffer->size;
    free(buffer->context);
}
ggml_backend_buffer_t host_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    void * memory = aligned_alloc(128, (size + 127) / 128 * 128);
    if (!memory) {
        return nullptr;
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(memory, size);
    buffer->buft                 = buft;
    buffer->context              = memory;
    buffer->iface.free_buffer    = host_free;
    counts.pinned += (int64_t) size;
    return buffer;
}

// ---- streams: queued copies run when a thread waits for them, not earlier ----

struct stream {
    std::vector<std::function<void()>> queue;
    ggml_backend_t                     cpu = ggml_backend_cpu_init();
};

stream & stream_of(ggml_backend_t backend) { return *static_cast<stream *>(backend->context); }

void fail_if_exhausted(int where) {
    if (exhausted == where) { // as upstream's ggml_cuda_error
        GGML_LOG_ERROR("CUDA error: out of memory\n");
        GGML_LOG_ERROR("  current device: 0\n");
        GGML_ABORT("CUDA error");
    }
}

void stream_synchronize(ggml_backend_t backend) {
    auto & queue = stream_of(backend).queue;
    for (const auto & work : queue) {
        work();
    }
    queue.clear();
}
void stream_wait(ggml_backend_t backend) {
    fail_if_exhausted(2);
    stream_synchronize(backend);
}
const char * stream_name(ggml_backend_t backend) { return ggml_backend_dev_name(backend->device); }
void         stream_free(ggml_backend_t backend) {
    stream_synchronize(backend);
    ggml_backend_free(stream_of(backend).cpu);
    delete &stream_of(backend);
    delete backend;
}
void stream_set(ggml_backend_t backend, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    uint8_t * to = inside(t, offset);
    stream_of(backend).queue.push_back([=] { copy(to, data, size, counts.writes); });
}
void stream_get(ggml_backend_t backend, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    const uint8_t * from = inside(t, offset);
    stream_of(backend).queue.push_back([=] { copy(data, from, size, counts.reads); });
}
bool stream_copy(ggml_backend_t source, ggml_backend_t target, const ggml_tensor * src, ggml_tensor * dst) {
    if (source != target || !on_a_device(src) || !on_a_device(dst)) {
        return false;
    }
    uint8_t *    from = inside(src), *to = inside(dst);
    const size_t size = ggml_nbytes(src);
    stream_of(target).queue.push_back([=] { copy(to, from, size, counts.copies); });
    return true;
}
std::atomic<lab_attention> attention{nullptr};

lab_paged arguments_of(const ggml_tensor * op) {
    const ggml_tensor *    q = op->src[0], *k = op->src[1], *v = op->src[2], *table = op->src[3], *sinks = op->src[4];
    ggml_paged_attn_params params;
    memcpy(&params, op->op_params, sizeof(params));
    lab_paged to{};
    to.type_k = k->type, to.type_v = v->type;
    to.d_k = k->ne[0], to.d_v = v->ne[0], to.n_head = q->ne[1], to.n_head_kv = k->ne[1];
    to.n_tokens = q->ne[2], to.n_slots = k->ne[2];
    to.n_rows = table->ne[1], to.width = table->ne[0] - GGML_PAGED_ATTN_HEADER;
    to.q_head_stride = (int64_t) q->nb[1], to.q_token_stride = (int64_t) q->nb[2];
    to.k_head_stride = (int64_t) k->nb[1], to.k_slot_stride = (int64_t) k->nb[2];
    to.v_head_stride = (int64_t) v->nb[1], to.v_slot_stride = (int64_t) v->nb[2];
    to.scale = params.scale, to.max_bias = params.max_bias, to.softcap = params.softcap;
    to.block_size = params.block_size, to.flags = params.flags;
    to.window = params.window, to.window_type = params.window_type;
    to.q = static_cast<const float *>(q->data), to.k = k->data, to.v = v->data;
    to.table = static_cast<const int32_t *>(table->data);
    to.sinks = sinks ? static_cast<const float *>(sinks->data) : nullptr;
    to.out   = static_cast<float *>(op->data);
    return to;
}

// Compute a graph with the CPU backend, except for the nodes that `attend` computes.
ggml_status compute_with(lab_attention attend, ggml_backend_t cpu, ggml_cgraph * graph) {
    const int n = ggml_graph_n_nodes(graph);
    for (int begin = 0, i = 0; i <= n; ++i) {
        if (i < n && ggml_graph_node(graph, i)->op != GGML_OP_PAGED_ATTN) {
            continue;
        }
        ggml_cgraph before = ggml_graph_view(graph, begin, i);
        if (const ggml_status status = ggml_backend_graph_compute(cpu, &before); status != GGML_STATUS_SUCCESS) {
            return status;
        }
        if (i < n) {
            const lab_paged op = arguments_of(ggml_graph_node(graph, i));
            if (const char * why = attend(&op)) {
                fprintf(stderr, "lab_device: %s\n", why);
                return GGML_STATUS_FAILED;
            }
            begin = i + 1;
        }
    }
    return GGML_STATUS_SUCCESS;
}

void count_shared(const ggml_tensor * op) {
    if (op->op == GGML_OP_PAGED_ATTN) {
        const ggml_tensor * table = op->src[3];
        for (int64_t row = 0; row < table->ne[1]; ++row) {
            counts.shared += static_cast<const int32_t *>(table->data)[row * table->ne[0] + GGML_PAGED_ATTN_SHARED];
        }
    }
}

ggml_status stream_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    stream_synchronize(backend);
    fail_if_exhausted(1);
    const at_work open;
    ++counts.graphs;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        count_shared(ggml_graph_node(graph, i));
    }
    ggml_backend_t cpu = stream_of(backend).cpu;
    ggml_backend_cpu_set_n_threads(cpu, 1);
    if (const lab_attention attend = attention) {
        return compute_with(attend, cpu, graph);
    }
    return ggml_backend_graph_compute(cpu, graph);
}

// ---- the device ----

device_state & state_of(ggml_backend_dev_t device) { return *static_cast<device_state *>(device->context); }

const char *               dev_name(ggml_backend_dev_t device) { return state_of(device).name.c_str(); }
const char *               dev_description(ggml_backend_dev_t) { return "laboratory device"; }
enum ggml_backend_dev_type dev_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
void                       dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total) {
    *total = state_of(device).total;
    *free  = *total - state_of(device).taken;
}
void dev_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    props->name        = dev_name(device);
    props->description = dev_description(device);
    props->type        = dev_type(device);
    dev_memory(device, &props->memory_free, &props->memory_total);
    props->caps = {true, true, false, false, true};
}
ggml_backend_t dev_init(ggml_backend_dev_t device, const char *) {
    static ggml_guid guid = {0x1a, 0xb0, 0xde, 0x71, 0xce, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    ggml_backend_i   iface{};
    iface.get_name         = stream_name;
    iface.free             = stream_free;
    iface.set_tensor_async = stream_set;
    iface.get_tensor_async = stream_get;
    iface.cpy_tensor_async = stream_copy;
    iface.synchronize      = stream_wait;
    iface.graph_compute    = stream_compute;
    ++counts.streams;
    return new ggml_backend{&guid, iface, device, new stream};
}
ggml_backend_buffer_type_t dev_buft(ggml_backend_dev_t device) { return &state_of(device).buft; }
ggml_backend_buffer_type_t dev_host_buft(ggml_backend_dev_t device) { return &state_of(device).host; }
bool                       dev_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
}
bool dev_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft) {
    return buft == &state_of(device).buft;
}
bool dev_offload_op(ggml_backend_dev_t, const ggml_tensor * op) { return op->ne[1] >= 32; } // as CUDA does

const char *       reg_name(ggml_backend_reg_t) { return "LAB"; }
size_t             reg_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t) {
    return &static_cast<device_state *>(reg->context)->device;
}
void * reg_address(ggml_backend_reg_t, const char *) { return nullptr; }

} // namespace

const char * lab_device_add(int64_t bytes) {
    if (bytes < 0) {
        return "a device cannot have fewer than 0 bytes";
    }
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    devices.push_back(std::make_unique<device_state>());
    device_state & d = *devices.back();
    d.name           = "LAB" + std::to_string(devices.size() - 1);
    d.total          = (size_t) bytes;
    auto * reg = new ggml_backend_reg{GGML_BACKEND_API_VERSION, {reg_name, reg_count, reg_device, reg_address}, &d};
    d.buft     = {{buft_name, buft_alloc, buft_alignment, nullptr, nullptr, nullptr}, &d.device, &d};
    d.host     = {{host_name, host_alloc, buft_alignment, nullptr, nullptr, host_is_host}, &d.device, &d};
    ggml_backend_device_i iface{};
    iface.get_name             = dev_name;
    iface.get_description      = dev_description;
    iface.get_memory           = dev_memory;
    iface.get_type             = dev_type;
    iface.get_props            = dev_props;
    iface.init_backend         = dev_init;
    iface.get_buffer_type      = dev_buft;
    iface.get_host_buffer_type = dev_host_buft;
    iface.supports_op          = dev_supports_op;
    iface.supports_buft        = dev_supports_buft;
    iface.offload_op           = dev_offload_op;
    d.device                   = {iface, reg, &d};
    ggml_backend_register(reg);
    return nullptr;
}

void lab_device_attend(lab_attention attend) { attention = attend; }

void lab_device_exhaust(int32_t where) { exhausted = where; }

lab_device_counts lab_device_count(void) { return counts; }
