#include "draw.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace velo {

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// Every token takes these loops over the whole vocabulary. Arrays of lanes let the compiler vectorize them.
constexpr int32_t n_lanes = 16;
constexpr int32_t chunk   = 64 * n_lanes;

// e^z for z <= 0, to 2 units in the last place, 0 below e^-87
inline float exp_below(float z) {
    const float bounded = z < -87.0f ? -87.0f : z;
    const auto  n       = static_cast<int32_t>(bounded * 1.44269504f - 0.5f); // z / ln 2, rounded
    const auto  whole   = static_cast<float>(n);
    const float r       = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f; // ln 2 in two parts
    float       series  = 1.0f / 5040.0f;
    series              = series * r + 1.0f / 720.0f;
    series              = series * r + 1.0f / 120.0f;
    series              = series * r + 1.0f / 24.0f;
    series              = series * r + 1.0f / 6.0f;
    series              = series * r + 0.5f;
    series              = series * r * r + r + 1.0f;
    const int32_t bits  = (n + 127) << 23;
    float         power;
    std::memcpy(&power, &bits, sizeof(power));
    return z < -87.0f ? 0.0f : series * power;
}

// Positive floats have the order of their bits. The exponent and the first bits of the mantissa are the class of a
// weight; weights of a class differ by less than 2 %.
constexpr int32_t class_shift = 17;
constexpr int32_t n_classes   = (0x3f800000 >> class_shift) + 1; // up to 1.0

inline int32_t class_of(float weight) {
    int32_t bits;
    std::memcpy(&bits, &weight, sizeof(bits));
    return bits >> class_shift;
}

double sum(const float * weights, int32_t n) {
    double  lanes[n_lanes] = {};
    int32_t i              = 0;
    for (; i + n_lanes <= n; i += n_lanes) {
        for (int32_t lane = 0; lane < n_lanes; ++lane) {
            lanes[lane] += static_cast<double>(weights[i + lane]);
        }
    }
    for (; i < n; ++i) {
        lanes[0] += static_cast<double>(weights[i]);
    }
    double total = 0.0;
    for (const double lane : lanes) {
        total += lane;
    }
    return total;
}

// Four lanes of a compiler's vector. Every compiler keeps these in registers; GCC stores arrays of lanes at each turn.
typedef float   four_floats __attribute__((vector_size(16)));
typedef int32_t four_masks __attribute__((vector_size(16)));

struct chunk_top {
    float max = -infinity;
    bool  bad = false; // NaN or infinity
};

chunk_top top_of_chunk(const float * logits, int32_t n) {
    constexpr int32_t n_vectors = n_lanes / 4;
    four_floats       most[n_vectors];
    four_masks        good[n_vectors];
    for (int32_t v = 0; v < n_vectors; ++v) {
        most[v] = four_floats{} - infinity;
        good[v] = ~four_masks{};
    }
    int32_t i = 0;
    for (; i + n_lanes <= n; i += n_lanes) {
        for (int32_t v = 0; v < n_vectors; ++v) {
            four_floats x;
            std::memcpy(&x, logits + i + 4 * v, sizeof(x));
            most[v] = x > most[v] ? x : most[v];
            good[v] &= x < infinity;
        }
    }
    chunk_top top;
    for (int32_t lane = 0; lane < n_lanes; ++lane) {
        top.max = std::max(top.max, most[lane / 4][lane % 4]);
        top.bad = top.bad || !good[lane / 4][lane % 4];
    }
    for (; i < n; ++i) {
        top.max = logits[i] > top.max ? logits[i] : top.max;
        top.bad = top.bad || !(logits[i] < infinity);
    }
    return top;
}

} // namespace

top_logit find_top(const float * logits, int32_t n) {
    top_logit best{-infinity, 0, true};
    int32_t   best_chunk = 0;
    for (int32_t start = 0; start < n; start += chunk) {
        const chunk_top top = top_of_chunk(logits + start, std::min(n - start, chunk));
        if (top.max > best.max) {
            best.max   = top.max;
            best_chunk = start;
        }
        best.computable = best.computable && !top.bad;
    }
    best.computable = best.computable && best.max > -infinity;
    if (best.computable) {
        best.token = static_cast<int32_t>(std::find(logits + best_chunk, logits + n, best.max) - logits);
    }
    return best;
}

double log_sum(const float * logits, int32_t n, float max) {
    float  weights[chunk];
    double total = 0.0;
    for (int32_t start = 0; start < n; start += chunk) {
        const int32_t size = std::min(n - start, chunk);
        for (int32_t i = 0; i < size; ++i) {
            weights[i] = exp_below(logits[start + i] - max);
        }
        total += sum(weights, size);
    }
    return std::log(total) + static_cast<double>(max);
}

bool is_better(const candidate & a, const candidate & b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// Collect logits above a floor. At 2k of them, keep the k largest and raise the floor.
void find_best(const float * logits, int32_t n, int32_t k, std::vector<candidate> & best) {
    const auto size  = static_cast<size_t>(k);
    float      floor = -infinity;
    const auto cut   = [&] {
        if (best.size() > size) {
            std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), is_better);
            best.resize(size);
            floor = best[size - 1].value;
        }
    };
    best.clear();
    for (int32_t i = 0; i < n; ++i) {
        if (logits[i] > floor) { // an equal logit here has a higher id and loses
            best.push_back({logits[i], i});
            if (best.size() == 2 * size) {
                cut();
            }
        }
    }
    cut();
}

// Select the k largest logits, in the order of ids.
void drawer::keep_best(const float * logits, int32_t n, int32_t k) {
    find_best(logits, n, k, best);
    std::sort(best.begin(), best.end(), [](const candidate & a, const candidate & b) { return a.id < b.id; });
    kept.clear();
    ids.clear();
    for (const candidate & token : best) {
        kept.push_back(token.value);
        ids.push_back(token.id);
    }
}

// Compute weights relative to the largest, so that no temperature overflows. Return their sum.
double drawer::weigh(const float * logits, int32_t n, float max, float temperature) {
    weights.resize(static_cast<size_t>(n));
    float * out = weights.data();
    for (int32_t i = 0; i < n; ++i) {
        out[i] = exp_below((logits[i] - max) / temperature);
    }
    return sum(out, n);
}

// Exclude all but the largest weights, whose sum reaches `mass`.
void drawer::keep_nucleus(double mass) {
    masses.assign(n_classes, 0.0);
    for (const float weight : weights) {
        masses[static_cast<size_t>(class_of(weight))] += static_cast<double>(weight);
    }
    int32_t edge = n_classes - 1;
    for (; edge > 0 && masses[static_cast<size_t>(edge)] < mass; --edge) {
        mass -= masses[static_cast<size_t>(edge)];
    }
    if (edge == 0) { // no exclusion: no weight is in class 0
        return;
    }
    best.clear();
    for (size_t i = 0; i < weights.size(); ++i) {
        if (class_of(weights[i]) == edge) {
            best.push_back({weights[i], static_cast<int32_t>(i)});
        }
    }
    std::sort(best.begin(), best.end(), is_better);
    size_t n = 0; // tokens of the class at the edge
    while (n < best.size() && mass > 0.0) {
        mass -= static_cast<double>(best[n++].value);
    }
    for (float & weight : weights) {
        weight = class_of(weight) > edge ? weight : 0.0f;
    }
    for (size_t i = 0; i < n; ++i) {
        weights[static_cast<size_t>(best[i].id)] = best[i].value;
    }
}

int32_t drawer::pick(double u) const {
    const auto    n      = static_cast<int32_t>(weights.size());
    const float * weight = weights.data();
    double        left   = u * sum(weight, n);
    for (int32_t start = 0; start < n; start += chunk) {
        const int32_t end  = std::min(n, start + chunk);
        const double  mass = sum(weight + start, end - start);
        if (left >= mass) {
            left -= mass;
            continue;
        }
        for (int32_t i = start; i < end; ++i) {
            if (left < static_cast<double>(weight[i])) {
                return i;
            }
            left -= static_cast<double>(weight[i]);
        }
    }
    int32_t last = n - 1; // rounding of sums may leave a rest
    while (last > 0 && weight[last] == 0.0f) {
        --last;
    }
    return last;
}

int32_t drawer::draw(const float * logits, int32_t n, float max, const draw_params & params, double u) {
    const bool cut = params.top_k > 0 && params.top_k < n;
    if (cut) { // before the temperature: the order is the same, and less work follows
        keep_best(logits, n, params.top_k);
        logits = kept.data();
        n      = static_cast<int32_t>(kept.size());
    }
    const double mass = weigh(logits, n, max, params.temperature);
    if (params.top_p < 1.0f) {
        keep_nucleus(mass * static_cast<double>(params.top_p));
    }
    if (params.min_p > 0.0f) {
        for (float & weight : weights) {
            weight = weight < params.min_p ? 0.0f : weight;
        }
    }
    const int32_t picked = pick(u);
    return cut ? ids[static_cast<size_t>(picked)] : picked;
}

} // namespace velo
