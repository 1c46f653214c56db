// Mixtures of experts: the router's logits, choice and gradients, rows sorted by expert, and sums of experts' outputs.
//
// A row chooses k experts. chosen: (rows, 2 k), the bits of the experts in ascending order, then the weight of each. An
// assignment is one of the k choices of a row; its place is row * k + j. All of the router is in float.

// A tile of logits of a warp: rows, and experts.
constexpr int TILE = 4;

// Each lane sums WIDE neighbouring channels at a time, and the lanes are added in a tree: the sum of a row and an
// expert is the same in every tile. A tile's rows and experts behind the last are the last again, and are not written.
template <bool PACKED>
__device__ inline void logits_of_tile(float* logits, const T* h, const T* w, int rows, int experts, int channels,
                                      int row, int expert) {
    const int lane = threadIdx.x % WARP;
    float sums[TILE][TILE] = {};
    for (int column = WIDE * lane; column < channels; column += WIDE * WARP) {
        const int some = channels - column;
        Some<WIDE> of_row[TILE];
        for (int i = 0; i < TILE; ++i) {
            const long long at = min(row + i, rows - 1);
            of_row[i] = read_as<PACKED, WIDE>(h + at * channels + column, some);
        }
        for (int j = 0; j < TILE; ++j) {
            const long long at = min(expert + j, experts - 1);
            const Some<WIDE> of_expert = read_as<PACKED, WIDE>(w + at * channels + column, some);
            for (int i = 0; i < TILE; ++i) {
                for (int n = 0; n < WIDE; ++n) {
                    sums[i][j] = fmaf(of_row[i].of[n], of_expert.of[n], sums[i][j]);
                }
            }
        }
    }
    for (int i = 0; i < TILE; ++i) {
        for (int j = 0; j < TILE; ++j) {
            const float sum = warp_sum(sums[i][j]);
            if (lane == 0 && row + i < rows && expert + j < experts) {
                logits[static_cast<long long>(row + i) * experts + expert + j] = sum;
            }
        }
    }
}

// logits = h w^T. h: (rows, C); w: (experts, C).
// launch: grid (ceil(rows / 4), ceil(experts / 32)), block (256)
extern "C" __global__ void route_logits(float* logits, const T* h, const T* w, int rows, int experts, int channels) {
    const int row = TILE * blockIdx.x;
    const int expert = TILE * (blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP);
    if (expert >= experts) {
        return;
    }
    if (are_packed<WIDE>(h, channels, channels) && are_packed<WIDE>(w, channels, channels)) {
        logits_of_tile<true>(logits, h, w, rows, experts, channels, row, expert);
    } else {
        logits_of_tile<false>(logits, h, w, rows, experts, channels, row, expert);
    }
}

// A number that is larger for a larger logit, and of equal logits for the smaller expert. NaN is below all numbers.
__device__ inline unsigned long long order_of(float logit, int expert) {
    const unsigned bits = logit == 0.0f ? 0 : __float_as_uint(logit); // -0 is equal to 0
    const unsigned order = logit != logit ? 0 : bits >> 31 != 0 ? ~bits : bits | 0x80000000;
    return static_cast<unsigned long long>(order) << 32 | ~static_cast<unsigned>(expert);
}

// The choice of each row, a warp a row. The weights are the softmax over the chosen logits if `normalised`, else over
// all; a logit that is NaN makes them NaN.
// launch: grid (ceil(rows / 8)), block (256)
extern "C" __global__ void choose_experts(float* chosen, const float* logits, int rows, int experts, int per_token,
                                          int normalised) {
    const int lane = threadIdx.x % WARP;
    const long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) {
        return;
    }
    chosen += row * 2 * per_token;
    logits += row * experts;
    float most = 0.0f;
    unsigned long long last = ~0ULL; // the best, then the next one, until all are found
    for (int found = 0; found < per_token; ++found) {
        unsigned long long best = 0;
        for (int expert = lane; expert < experts; expert += WARP) {
            const unsigned long long order = order_of(logits[expert], expert);
            best = order < last && order > best ? order : best;
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            const unsigned long long other = __shfl_xor_sync(FULL_MASK, best, step);
            best = other > best ? other : best;
        }
        most = found == 0 ? logits[~static_cast<unsigned>(best)] : most;
        last = best;
    }
    float total = 0.0f;
    for (int expert = lane; expert < experts; expert += WARP) {
        const float logit = logits[expert];
        const bool is_counted = !normalised || logit != logit || order_of(logit, expert) >= last;
        total += is_counted ? expf(logit - most) : 0.0f;
    }
    total = warp_sum(total);
    int before = 0;
    for (int from = 0; from < experts; from += WARP) {
        const int expert = from + lane;
        const bool is_chosen = expert < experts && order_of(logits[expert], expert) >= last;
        const unsigned all = __ballot_sync(FULL_MASK, is_chosen);
        if (is_chosen) {
            const int j = before + __popc(all & ((1U << lane) - 1));
            chosen[j] = __int_as_float(expert);
            chosen[per_token + j] = expf(logits[expert] - most) / total;
        }
        before += __popc(all);
    }
}

// dl, the gradient of the logits, a warp a row. dchosen: (rows, k), the gradients of the weights.
// launch: grid (ceil(rows / 8)), block (256)
extern "C" __global__ void route_gradient(float* dl, const float* logits, const float* chosen, const float* dchosen,
                                          int rows, int experts, int per_token, int normalised) {
    const int lane = threadIdx.x % WARP;
    const long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) {
        return;
    }
    dl += row * experts;
    logits += row * experts;
    chosen += row * 2 * per_token;
    dchosen += row * per_token;
    float mean = 0.0f, most = -infinity(), total = 0.0f;
    for (int j = lane; j < per_token; j += WARP) {
        mean += chosen[per_token + j] * dchosen[j];
    }
    mean = warp_sum(mean);
    if (!normalised) {
        for (int expert = lane; expert < experts; expert += WARP) {
            most = fmaxf(most, logits[expert]);
        }
        most = warp_max(most);
        for (int expert = lane; expert < experts; expert += WARP) {
            total += expf(logits[expert] - most);
        }
        total = warp_sum(total);
    }
    for (int expert = lane; expert < experts; expert += WARP) {
        dl[expert] = normalised ? 0.0f : expf(logits[expert] - most) / total * -mean;
    }
    __syncwarp(); // the chosen ones are written again, by other lanes
    for (int j = lane; j < per_token; j += WARP) {
        dl[__float_as_int(chosen[j]) & 0x7fffffff] = chosen[per_token + j] * (dchosen[j] - mean);
    }
}

// dh += dl w: the sum over the experts in order is added. A block has some rows, so that w is read less often.
// launch: grid (ceil(rows / 8), ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void route_rows(float* dh, const float* dl, const T* w, int rows, int experts, int channels) {
    constexpr int COUNT = 8;
    const int column = my_column(), some = channels - column;
    if (some <= 0) {
        return;
    }
    const long long first = static_cast<long long>(COUNT) * blockIdx.x;
    Four sums[COUNT] = {};
    for (int expert = 0; expert < experts; ++expert) {
        const Four of_w = read(w + static_cast<long long>(expert) * channels + column, some);
        for (int i = 0; i < COUNT; ++i) {
            const float d = dl[min(first + i, rows - 1LL) * experts + expert];
            for (int n = 0; n < 4; ++n) {
                sums[i].of[n] = fmaf(d, of_w.of[n], sums[i].of[n]);
            }
        }
    }
    for (int i = 0; i < COUNT; ++i) {
        if (first + i < rows) {
            float* const to = dh + (first + i) * channels + column;
            Four sum = read(to, some);
            for (int n = 0; n < 4; ++n) {
                sum.of[n] += sums[i].of[n];
            }
            write(to, sum, some);
        }
    }
}

// dw (+)= dl^T h: sums over `part` rows each, added in order. A block has some experts, so that h is read less often.
// launch: grid (ceil(experts / 4), ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void route_weights(float* dw, const float* dl, const T* h, int rows, int experts, int channels,
                                         int part, int accumulate) {
    constexpr int COUNT = 4;
    const int column = my_column(), some = channels - column;
    if (some <= 0) {
        return;
    }
    const int first = COUNT * blockIdx.x;
    dw += static_cast<long long>(first) * channels + column;
    Four totals[COUNT] = {};
    for (int i = 0; i < COUNT; ++i) {
        if (accumulate && first + i < experts) {
            totals[i] = read(dw + static_cast<long long>(i) * channels, some);
        }
    }
    for (long long from = 0; from < rows; from += part) {
        Four sums[COUNT] = {};
        for (long long row = from; row < min(from + part, static_cast<long long>(rows)); ++row) {
            const Four of_h = read(h + row * channels + column, some);
            for (int i = 0; i < COUNT; ++i) {
                const float d = dl[row * experts + min(first + i, experts - 1)];
                for (int n = 0; n < 4; ++n) {
                    sums[i].of[n] = fmaf(d, of_h.of[n], sums[i].of[n]);
                }
            }
        }
        for (int i = 0; i < COUNT; ++i) {
            for (int n = 0; n < 4; ++n) {
                totals[i].of[n] += sums[i].of[n];
            }
        }
    }
    for (int i = 0; i < COUNT; ++i) {
        if (first + i < experts) {
            write(dw + static_cast<long long>(i) * channels, totals[i], some);
        }
    }
}

// The assignments, sorted by expert, then by row: the row and the place of each, and the count of each expert. A block
// has an expert. It counts the assignments to the experts before it, so that it knows where its own begin.
// launch: grid (experts), block (512)
extern "C" __global__ void dispatch(int* row_of, int* places, int* counts, const float* chosen, int rows,
                                    int experts, int per_token) {
    const int expert = blockIdx.x;
    if (expert >= experts) {
        return;
    }
    int smaller = 0;
    for (long long row = threadIdx.x; row < rows; row += blockDim.x) {
        for (int j = 0; j < per_token; ++j) {
            const int one = __float_as_int(chosen[2 * row * per_token + j]); // below 0: dropped
            smaller += one >= 0 && one < expert;
        }
    }
    const int begin = block_sum(smaller);
    int next = begin;
    for (int from = 0; from < rows; from += blockDim.x) {
        const int row = from + threadIdx.x;
        int place = -1;
        for (int j = 0; row < rows && j < per_token; ++j) {
            if (__float_as_int(chosen[2LL * row * per_token + j]) == expert) {
                place = row * per_token + j;
            }
        }
        const Rank rank = block_rank(place >= 0);
        if (place >= 0) {
            row_of[next + rank.before] = row;
            places[next + rank.before] = place;
        }
        next += rank.all;
    }
    if (threadIdx.x == 0) {
        counts[expert] = next - begin;
    }
}

// The weight of an assignment.
__device__ inline float weight_at(const float* chosen, int per_token, int place) {
    return chosen[(2LL * (place / per_token) + 1) * per_token + place % per_token];
}

// y[row_of[i]] += weight x[i]; without places, the weight is 1; without row_of, row i of y. The rows of one expert
// differ. Product and sum are rounded apart.
// launch: grid (count, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void combine_rows(float* y, const T* x, const int* row_of, const int* places, const float* chosen,
                                        int per_token, int count, int channels) {
    const long long at = blockIdx.x;
    const int column = my_column(), some = channels - column;
    if (at >= count || some <= 0) {
        return;
    }
    const float weight = places == nullptr ? 1.0f : weight_at(chosen, per_token, places[at]);
    const long long row = row_of == nullptr ? at : row_of[at];
    y += row * channels + column;
    Four sum = read(y, some);
    const Four more = read(x + at * channels + column, some);
    for (int i = 0; i < 4; ++i) {
        sum.of[i] = __fadd_rn(sum.of[i], __fmul_rn(weight, more.of[i]));
    }
    write(y, sum, some);
}

// y[i] = weight x[i].
// launch: grid (count, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void weigh_rows(T* y, const T* x, const int* places, const float* chosen, int per_token,
                                      int count, int channels) {
    const long long at = blockIdx.x;
    const int column = my_column(), some = channels - column;
    if (at >= count || some <= 0) {
        return;
    }
    const float weight = weight_at(chosen, per_token, places[at]);
    Four values = read(x + at * channels + column, some);
    for (int i = 0; i < 4; ++i) {
        values.of[i] *= weight;
    }
    write(y + at * channels + column, values, some);
}

// out[places[i]] = the sum of x[i] y[i], a warp a row.
// launch: grid (ceil(count / 8)), block (256)
extern "C" __global__ void row_dots(float* out, const T* x, const T* y, const int* places, int count, int channels) {
    const int lane = threadIdx.x % WARP;
    const long long at = static_cast<long long>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (at >= count) {
        return;
    }
    x += at * channels;
    y += at * channels;
    float sum = 0.0f;
    for (int column = 4 * lane; column < channels; column += 4 * WARP) {
        const Four a = read(x + column, channels - column), b = read(y + column, channels - column);
        for (int i = 0; i < 4; ++i) {
            sum = fmaf(a.of[i], b.of[i], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        out[places[at]] = sum;
    }
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// y = sigmoid(gate) x, with one gate a row.
// launch: grid (rows, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void gate_rows(float* y, const T* x, const T* gate, int rows, int channels) {
    const long long row = blockIdx.x;
    const int column = my_column(), some = channels - column;
    if (row >= rows || some <= 0) {
        return;
    }
    const float scale = sigmoid(get(gate[row]));
    Four values = read(x + row * channels + column, some);
    for (int i = 0; i < 4; ++i) {
        values.of[i] *= scale;
    }
    write(y + row * channels + column, values, some);
}

// dx and dgate of gate_rows, a block a row.
// launch: grid (rows), block (threads(channels))
extern "C" __global__ void gate_rows_backward(T* dx, T* dgate, const T* dy, const T* x, const T* gate, int rows,
                                              int channels) {
    const long long row = blockIdx.x;
    if (row >= rows) {
        return;
    }
    const float scale = sigmoid(get(gate[row]));
    float sum = 0.0f;
    for (int column = 4 * threadIdx.x; column < channels; column += 4 * blockDim.x) {
        const int some = channels - column;
        const long long at = row * channels + column;
        Four d = read(dy + at, some);
        const Four of_x = read(x + at, some);
        for (int i = 0; i < 4; ++i) {
            sum = fmaf(d.of[i], of_x.of[i], sum);
            d.of[i] *= scale;
        }
        write(dx + at, d, some);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        dgate[row] = put(sum * scale * (1.0f - scale));
    }
}

// ---- Losses and limits of routers. A chosen expert whose highest bit is set is dropped: it has no row. ----

__device__ inline int expert_of(float chosen) { return __float_as_int(chosen) & 0x7fffffff; }

__device__ inline bool is_dropped(float chosen) { return __float_as_int(chosen) < 0; }

// The number of a row's choices that are better than this one.
__device__ inline int rank_of(const float* chosen, const float* logits, int per_token, int choice) {
    const int own = expert_of(chosen[choice]);
    const unsigned long long order = order_of(logits[own], own);
    int better = 0;
    for (int j = 0; j < per_token; ++j) {
        const int other = expert_of(chosen[j]);
        better += order_of(logits[other], other) > order;
    }
    return better;
}

// The log-sum-exp of a row's logits, in all lanes of a warp.
__device__ inline float log_sum_exp(const float* logits, int experts) {
    const int lane = threadIdx.x % WARP;
    float most = -infinity(), total = 0.0f;
    for (int expert = lane; expert < experts; expert += WARP) {
        most = fmaxf(most, logits[expert]);
    }
    most = warp_max(most);
    for (int expert = lane; expert < experts; expert += WARP) {
        total += expf(logits[expert] - most);
    }
    return most + logf(warp_sum(total));
}

// The log-sum-exp of each row, a warp a row.
// launch: grid (ceil(rows / 8)), block (256)
extern "C" __global__ void route_lse(float* lse, const float* logits, int rows, int experts) {
    const long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) {
        return;
    }
    const float sum = log_sum_exp(logits + row * experts, experts);
    if (threadIdx.x % WARP == 0) {
        lse[row] = sum;
    }
}

// The sums of a sequence: (sequences, 2 experts + 2). A block has the two sums of an expert; the last two blocks have
// the squares of lse, and the dropped assignments.
// launch: grid (experts + 2, sequences), block (256)
extern "C" __global__ void measure_routes(float* out, const float* logits, const float* lse, const float* chosen,
                                          const int* starts, int sequences, int rows, int experts, int per_token,
                                          int first_choice, int accumulate) {
    const int expert = blockIdx.x;
    const Sequence sequence = sequence_at(starts, sequences, rows, blockIdx.y);
    float count = 0.0f, sum = 0.0f;
    for (int at = threadIdx.x; at < sequence.count; at += blockDim.x) {
        const long long row = sequence.first + at;
        const float* const own_logits = logits + row * experts;
        const float* const own = chosen + 2 * row * per_token;
        if (expert < experts) {
            sum += expf(own_logits[expert] - lse[row]);
        } else if (expert == experts) {
            sum += lse[row] * lse[row];
        }
        for (int j = 0; j < per_token; ++j) {
            if (expert > experts) {
                sum += is_dropped(own[j]) ? 1.0f : 0.0f;
            } else if (expert_of(own[j]) == expert) {
                count += !first_choice || rank_of(own, own_logits, per_token, j) == 0 ? 1.0f : 0.0f;
            }
        }
    }
    count = block_sum(count);
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        out += (2LL * experts + 2) * blockIdx.y + experts + expert;
        *out = accumulate ? *out + sum : sum;
        if (expert < experts) {
            out -= experts;
            *out = accumulate ? *out + count : count;
        }
    }
}

// Copies a choice, and drops the assignments of an expert beyond its capacity in a sequence: ceil(millionths k T / (1e6 experts)), or none if
// `millionths` is 0. If `draws` has a threshold, the second choice of a row is kept with a probability of twice its
// weight. A block writes the assignments of one expert.
// launch: grid (experts, sequences), block (512)
extern "C" __global__ void limit_experts(float* limited, const float* chosen, const float* logits, const int* starts,
                                         int sequences, int rows, int experts, int per_token, int millionths,
                                         Dropout draws) {
    const int expert = blockIdx.x;
    const Sequence sequence = sequence_at(starts, sequences, rows, blockIdx.y);
    const long long over = 1000000LL * experts;
    const long long places = (static_cast<long long>(millionths) * per_token * sequence.count + over - 1) / over;
    const long long most = millionths == 0 ? sequence.count : places > 1 ? places : 1;
    long long taken = 0;
    for (int rank = 0; rank < per_token; ++rank) {
        for (int from = 0; from < sequence.count; from += blockDim.x) {
            const int position = from + threadIdx.x;
            const long long row = sequence.first + position;
            const float* const own = chosen + 2 * row * per_token;
            int choice = -1;
            for (int j = 0; position < sequence.count && j < per_token; ++j) {
                if (expert_of(own[j]) == expert && rank_of(own, logits + row * experts, per_token, j) == rank) {
                    choice = j;
                }
            }
            bool is_kept = choice >= 0;
            if (is_kept && rank == 1 && draws.threshold != 0) {
                const Draws drawn = philox({0, draws.first_position + static_cast<unsigned>(position),
                                            draws.first_sequence + static_cast<unsigned>(sequence.index), draws.site},
                                           draws.key[0], draws.key[1]);
                const float weight = own[per_token + choice];
                is_kept = 2.0f * weight >= 1.0f || drawn.of[0] < static_cast<unsigned>(weight * 8589934592.0f); // 2^33
            }
            const Rank place = block_rank(is_kept);
            if (choice >= 0) {
                const bool has_place = is_kept && taken + place.before < most;
                float* const to = limited + 2 * row * per_token;
                to[choice] = __int_as_float(has_place ? expert : expert | 0x80000000);
                to[per_token + choice] = own[per_token + choice];
            }
            taken += place.all;
        }
    }
}

// dl += p (b - sum p b) + z lse p, a warp a row. slopes: (sequences, experts + 1), b and z.
// launch: grid (ceil(rows / 8)), block (256)
extern "C" __global__ void route_slopes(float* dl, const float* logits, const float* slopes, const int* starts,
                                        int sequences, int rows, int experts) {
    const int lane = threadIdx.x % WARP;
    const long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) {
        return;
    }
    dl += row * experts;
    logits += row * experts;
    slopes += sequence_of(starts, sequences, rows, row).index * (experts + 1LL);
    const float lse = log_sum_exp(logits, experts);
    float mean = 0.0f;
    for (int expert = lane; expert < experts; expert += WARP) {
        mean += expf(logits[expert] - lse) * slopes[expert];
    }
    const float rest = slopes[experts] * lse - warp_sum(mean);
    for (int expert = lane; expert < experts; expert += WARP) {
        dl[expert] += expf(logits[expert] - lse) * (slopes[expert] + rest);
    }
}
