// The draw of one token: temperature, top-k, top-p, min-p over a whole vocabulary, in linear time.
#pragma once

#include <cstdint>
#include <vector>

namespace velo {

// What find_top tells of a row of logits.
struct top_logit {
    float   max;
    int32_t token;      // the lowest id that has it
    bool    computable; // no NaN, no +infinity, something finite
};
top_logit find_top(const float * logits, int32_t n);

// ln of the sum of e^logit; `max` is the largest of them
double log_sum(const float * logits, int32_t n, float max);

struct candidate {
    float   value;
    int32_t id;
};
// the larger value; of equal ones the lower id
bool is_better(const candidate & a, const candidate & b);
// The k largest logits, in no order; `best` is made anew.
void find_best(const float * logits, int32_t n, int32_t k, std::vector<candidate> & best);

struct draw_params {
    float   temperature; // above 0
    int32_t top_k;       // 0: off
    float   top_p;       // 1: off
    float   min_p;       // 0: off
};

// Draws; holds the scratch of it, which is as long as the vocabulary.
//
// Every step keeps the tokens in the order of their ids, equal ones of lower id first, and uses no function of the
// platform's mathematics: equal logits and equal u give equal tokens everywhere.
class drawer {
public:
    // `max` is the largest logit, u uniform in [0, 1)
    int32_t draw(const float * logits, int32_t n, float max, const draw_params & params, double u);

private:
    void    keep_best(const float * logits, int32_t n, int32_t k);
    double  weigh(const float * logits, int32_t n, float max, float temperature);
    void    keep_nucleus(double mass);
    int32_t pick(double u) const;

    std::vector<candidate> best;    // top-k, and then what lies at the edge of the nucleus
    std::vector<float>     kept;    // the logits of top-k ...
    std::vector<int32_t>   ids;     // ... and whose they are
    std::vector<float>     weights; // the largest is 1; 0: left out
    std::vector<double>    masses;  // of weights that are about equal
};

} // namespace velo
