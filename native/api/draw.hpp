// The draw of one token: temperature, top-k, top-p, min-p over a whole vocabulary, in linear time.
#pragma once

#include <cstdint>
#include <vector>

namespace velo {

// Maximum of a row of logits.
struct top_logit {
    float   max;
    int32_t token;      // the lowest id with this logit
    bool    computable; // no NaN, no +infinity, at least one finite logit
};
top_logit find_top(const float * logits, int32_t n);

// Return the natural logarithm of the sum of e^logit. `max` is the largest logit.
double log_sum(const float * logits, int32_t n, float max);

struct candidate {
    float   value;
    int32_t id;
};
// Order by value, largest first; equal values by id, lowest first.
bool is_better(const candidate & a, const candidate & b);
// Write the k largest logits to `best`, in any order.
void find_best(const float * logits, int32_t n, int32_t k, std::vector<candidate> & best);

struct draw_params {
    float   temperature; // above 0
    int32_t top_k;       // 0: off
    float   top_p;       // 1: off
    float   min_p;       // 0: off
};

// Draws tokens. Holds buffers as long as the vocabulary.
//
// Every step keeps the tokens in the order of their ids, prefers the lower id of equal tokens, and uses no function of
// the platform's math library: equal logits and equal u give equal tokens on every machine.
class drawer {
public:
    // Draw a token. `max` is the largest logit, u is uniform in [0, 1).
    int32_t draw(const float * logits, int32_t n, float max, const draw_params & params, double u);

private:
    void    keep_best(const float * logits, int32_t n, int32_t k);
    double  weigh(const float * logits, int32_t n, float max, float temperature);
    void    keep_nucleus(double mass);
    int32_t pick(double u) const;

    std::vector<candidate> best;    // top-k, then the tokens at the edge of top-p
    std::vector<float>     kept;    // logits of the top-k tokens
    std::vector<int32_t>   ids;     // their ids
    std::vector<float>     weights; // relative to the largest; 0: excluded
    std::vector<double>    masses;  // sums of weights by class of about equal weights
};

} // namespace velo
