// A launch's share of one thread block, for all kernels.
#pragma once

#include "paged-attend-columns.h"
#include "paged-attend-rows.h"
#include "paged-attend-tokens.h"
#include "paged-merge.h"

namespace paged {

// The work of a kernel, by the division of a tile among warps; M_TILES: tiles of sixteen rows of a warp, of eight if
// warps divide the tokens; V_TILES: sixteens of columns of V in a warp's registers.
template <division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers> struct kernel_of;
template <int M_TILES, int V_TILES, class KNumbers, class VNumbers>
struct kernel_of<BY_TOKENS, M_TILES, V_TILES, KNumbers, VNumbers> {
    using work = attend_tokens<M_TILES, V_TILES, KNumbers, VNumbers>;
};
template <int M_TILES, int V_TILES, class KNumbers, class VNumbers>
struct kernel_of<BY_ROWS, M_TILES, V_TILES, KNumbers, VNumbers> {
    using work = attend_rows<M_TILES, V_TILES, KNumbers, VNumbers>;
};
template <int M_TILES, int V_TILES, class KNumbers, class VNumbers>
struct kernel_of<BY_COLUMNS, M_TILES, V_TILES, KNumbers, VNumbers> {
    using work = attend_columns<M_TILES, V_TILES, KNumbers, VNumbers>;
};

template <division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
constexpr int kernel_threads = n_threads(BY, kernel_of<BY, M_TILES, V_TILES, KNumbers, VNumbers>::work::ROWS);

// The items of a thread block.
struct block_items {
    int  n, all;
    bool in_rounds;

    GPU_FN block_items(division by, int all) : all(all), in_rounds(by == BY_ROWS) {
        const int blocks = gpu::n_blocks();
        n                = in_rounds ? ceil_div(all, blocks) : all / blocks + (gpu::block() < all % blocks);
    }

    // Return the number of this block's i-th item. Splits follow one another. Tiles of rows become shorter: each block
    // takes one in each round, and every second round is reversed, so that all have about as much to do.
    GPU_FN int operator[](int i) const {
        const int blocks = gpu::n_blocks(), block = gpu::block();
        if (in_rounds) {
            return i * blocks + (i % 2 ? blocks - 1 - block : block);
        }
        const int rest = all % blocks;
        return block * (all / blocks) + (block < rest ? block : rest) + i;
    }
};

// Find the rows of the table of items `first` .. first + n - 1 of this block. `split` becomes an item's number within
// its row. Each thread looks at a row; `before`: items before the first one.
template <class Plan>
GPU_FN void find_rows(const Plan & plan, const block_items & own, int before, int first, int n, work_item * items) {
    GPU_ROLLED
    for (int row = plan.p.first_row + gpu::thread(); row < plan.p.end_row; row += gpu::n_threads()) {
        const int begin = plan.items_before(row) - before, end = plan.items_before(row + 1) - before;
        GPU_ROLLED
        for (int i = 0; i < n; ++i) {
            const int number = own[first + i];
            if (number >= begin && number < end) {
                items[i].row   = row;
                items[i].split = number - begin;
            }
        }
    }
}

// Write this block's items from `first` on, at most MAX_PLANNED, and return their number. For all threads.
template <division BY, int TILE_ROWS>
GPU_FN int plan_items(const params & p, row_range of, int first, work_item * items) {
    const attend_plan<TILE_ROWS> plan(p, of, gpu::n_blocks());
    const int                    before = plan.items_before(p.first_row);
    const block_items            own(BY, plan.items_before(p.end_row) - before);
    int                          n = own.n - first < MAX_PLANNED ? own.n - first : MAX_PLANNED;
    if (n <= 0) {
        return 0;
    }
    n -= own[first + n - 1] >= own.all; // the last round may lack it
    find_rows(plan, own, before, first, n, items);
    gpu::sync_block();
    if (gpu::thread() < n) { // each thread completes one item
        items[gpu::thread()] = item_of(plan, items[gpu::thread()].row, items[gpu::thread()].split);
    }
    gpu::sync_block();
    if (gpu::thread() + 1 < n) {
        items[gpu::thread()].continued = follows(items[gpu::thread() + 1], items[gpu::thread()], STEP_TOKENS);
    }
    gpu::sync_block();
    return n;
}

template <division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
GPU_FN void attend_items(const params & p, row_range of, int tokens, char * memory) {
    using work = typename kernel_of<BY, M_TILES, V_TILES, KNumbers, VNumbers>::work;

    const layout at    = layout_of<KNumbers, VNumbers>(p, BY, work::ROWS, BY == BY_TOKENS ? GROUP : tokens);
    work_item *  items = (work_item *) (memory + at.items);
    int          n     = MAX_PLANNED;
    for (int first = 0; n == MAX_PLANNED; first += MAX_PLANNED) { // planned anew, which needs no registers meanwhile
        n = plan_items<BY, work::ROWS>(p, of, first, items);
        if (first == 0) { // the table has no kernel's results, but queries, K and V have
            gpu::wait_for_last_kernel();
            gpu::let_next_kernel_begin(); // not before: the merge may write where kernels before this one read
        }
        for (int next = 0; next < n;) {
            work item(p, memory, at, items[next]);
            next = item.run(next + 1);
        }
        gpu::sync_block(); // all warps have read the items
    }
}

template <division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
GPU_FN void attend_block(const params & p, row_range of, int tokens, char * memory) {
    if constexpr (KNumbers::size != 0) {
        const params known = with_constants<KNumbers>(p);
        attend_items<BY, M_TILES, V_TILES, KNumbers, VNumbers>(known, of, tokens, memory);
    } else {
        attend_items<BY, M_TILES, V_TILES, KNumbers, VNumbers>(p, of, tokens, memory);
    }
}

} // namespace paged
