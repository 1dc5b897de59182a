#include "paged-attn-cpu.h"

#include "ggml-cpu-impl.h"
#include "hand-out.h"
#include "paged-plan.h"
#include "paged-reference.h"

using namespace paged;

namespace {

size_t round_up(size_t bytes) { return (bytes + 63) & ~size_t(63); }

// The work buffer: partial results, then for each thread its plan, a mark for each output row, and a kernel's scratch.
struct work_layout {
    size_t partials, tasks, marks, scratch;

    work_layout(const problem & p, int n_threads)
        : partials(round_up(partial_bytes(p, n_threads))), tasks(round_up(p.n_rows * sizeof(task))),
          marks(round_up(p.n_tokens)) {
        scratch = std::max({tile_scratch(p), decode_scratch(p, decode_rows_together(p)), reference_work_size(p)});
        scratch = round_up(scratch);
    }
    size_t thread() const { return tasks + marks + scratch; }
    size_t total(int n_threads) const { return partials + n_threads * thread() + 64; }
};

// One thread's view of a call.
struct worker {
    const ggml_compute_params * params;
    problem                     p;
    char *                      partials;
    size_t                      partials_size;
    task *                      tasks;
    char *                      marks;
    char *                      scratch;

    worker(const ggml_compute_params * params, const ggml_tensor * dst) : params(params), p(dst) {
        const work_layout lay(p, params->nth);
        char *            base = (char *) round_up((uintptr_t) params->wdata); // the caller's need not be aligned
        partials               = base;
        partials_size          = lay.partials;
        tasks                  = (task *) (base + lay.partials + params->ith * lay.thread());
        marks                  = (char *) tasks + lay.tasks;
        scratch                = marks + lay.marks;
    }
};

// Zeros the output rows of no sequence.
void clear_uncovered(const worker & w, const plan & made) {
    memset(w.marks, 0, w.p.n_tokens);
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        memset(w.marks + made.tasks[i].s.q0, 1, made.tasks[i].s.n_q);
    }
    for (int64_t token = w.params->ith; token < w.p.n_tokens; token += w.params->nth) {
        for (int64_t head = 0; head < w.p.n_head && !w.marks[token]; ++head) {
            memset(w.p.output(head, token), 0, w.p.d_v * sizeof(float));
        }
    }
}

constexpr int64_t dynamic_rows = 8; // query rows of a step from which on its work outlasts a barrier many times

// Hands out the items one by one if each thread gets several, or in a step of many rows more than one.
hand_out items_of(const worker & w, const plan & made) {
    const int64_t several = w.p.n_tokens < dynamic_rows ? 4 : 1;
    return made.n_items > several * w.params->nth ? hand_out(w.params, made.n_items, 1, 1)
                                                  : hand_out(w.params, made.n_items);
}

void run_items(const worker & w, const plan & made) {
    hand_out items = items_of(w, made);
    if (items.is_dynamic()) {
        items.start();
        ggml_barrier(w.params->threadpool);
    }
    const task *  t      = made.tasks;
    const int64_t stride = items.is_dynamic() ? w.params->nth : 1; // to the item that likely follows in this thread
    while (items.next()) {
        for (int64_t i = items.begin(); i < items.end(); ++i) {
            while (i >= t->first_item + t->items()) {
                ++t;
            }
            run_item(w.p, *t, i - t->first_item, first_read_of(w.p, made, t, i + stride), w.scratch);
        }
    }
}

// Merges the chunks of one output row, in position order.
void merge_row(const worker & w, const task & t, int64_t j, int64_t head) {
    row_state state = {0.0f, 0.0f, (float *) w.scratch};
    clear(state, w.p.d_v);
    const int64_t position = t.s.position(j);
    for (int64_t c = first_visible(w.p, position) / chunk_tokens; c <= position / chunk_tokens; ++c) {
        const float * partial = t.partials.at(w.p, t.s, c, j, head);
        merge(state, {partial[0], partial[1]}, partial + 2, w.p.d_v);
    }
    finish(w.p, state, head, w.p.output(head, t.s.q0 + j));
}

void merge_chunks(const worker & w, const plan & made) {
    ggml_barrier(w.params->threadpool);
    int64_t row = 0;
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        const task & t = made.tasks[i];
        for (int64_t j = 0; j < t.s.n_q && t.partials.base; ++j) {
            for (int64_t head = 0; head < w.p.n_head; ++head, ++row) {
                if (row % w.params->nth == w.params->ith) {
                    merge_row(w, t, j, head);
                }
            }
        }
    }
}

} // namespace

size_t ggml_paged_attn_work_size(const ggml_tensor * dst, int n_tasks) {
    const problem p(dst);
    return work_layout(p, n_tasks).total(n_tasks);
}

void ggml_compute_forward_paged_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    const worker w(params, dst);
    const plan   made = make_plan(w.p, params->nth, w.tasks, w.partials, w.partials_size);
    if (!made.covers_all) {
        clear_uncovered(w, made);
    }
    // a deterministic context sets use_ref for its matrix products
    if (params->use_ref && !w.p.deterministic()) {
        reference(w.p, params->ith, params->nth, w.scratch);
        return;
    }
    run_items(w, made);
    if (made.merges) {
        merge_chunks(w, made);
    }
}
