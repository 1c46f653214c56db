// Softmax cross entropy over tiles of the vocabulary, with a running log-sum-exp.
//
// A position has four floats of statistics: running maximum, running sum, the target's logit, and the label's bits; a
// negative label means that the position has no loss. Each tile of logits updates them. The bias of the tile's columns
// is added here.

// Four logits from `column` on; −∞ past the last column.
__device__ inline Four biased(const float* logits, const T* bias, int column, int tile) {
    const int count = min(4, tile - column);
    Four values = read(logits + column, count);
    if (bias != nullptr) {
        const Four more = read(bias + column, count);
        for (int i = 0; i < 4; ++i) {
            values.of[i] += more.of[i];
        }
    }
    for (int i = 0; i < 4; ++i) {
        values.of[i] = i < count ? values.of[i] : -infinity();
    }
    return values;
}

// The maximum over the block; all threads get it.
__device__ inline float block_max(float x) {
    __shared__ float maxima[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    if (lane == 0) {
        maxima[warp] = x;
    }
    __syncthreads();
    return warp_max(lane < warps ? maxima[lane] : -infinity());
}

// Updates the statistics of some rows with a tile of logits. out: (R, 4); logits: (rows, tile), rows `stride` apart;
// bias: (tile) or null. places: for each row of logits its row of out, or -1 for none. `first`: the tile's first column
// in the vocabulary. `own`, `each`: label smoothing's weight of the target, and that of every class.
// launch: grid (rows), block (256)
extern "C" __global__ void __launch_bounds__(256)
    score_rows(float* out, const float* logits, const T* bias, const int* places, int rows, int tile,
               int stride, int first, float own, float each) {
    const long long row = places[blockIdx.x];
    if (row < 0) {
        return;
    }
    float* const statistics = out + 4 * row;
    const int label = __float_as_int(statistics[3]), target = label - first;
    if (label < 0) {
        return;
    }
    logits += static_cast<long long>(blockIdx.x) * stride;
    // Each thread has a maximum and a sum of its own, so it reads each logit once.
    float most = -infinity(), sum = 0.0f, total = 0.0f;
    for (int column = 4 * threadIdx.x; column < tile; column += 4 * blockDim.x) {
        const Four values = biased(logits, bias, column, tile);
        const float largest = fmaxf(fmaxf(values.of[0], values.of[1]), fmaxf(values.of[2], values.of[3]));
        if (largest > most) {
            sum *= expf(most - largest);
            most = largest;
        }
        if (each != 0.0f) {
            for (int i = 0; i < min(4, tile - column); ++i) {
                total += values.of[i];
            }
        }
        if (most > -infinity()) {
            for (int i = 0; i < 4; ++i) {
                sum += expf(values.of[i] - most);
            }
        }
    }
    const float before = statistics[0], most_of_all = fmaxf(before, block_max(most));
    const float base = most_of_all > -infinity() ? most_of_all : 0.0f;
    sum = block_sum(sum * expf(most - base));
    if (each != 0.0f) {
        total = block_sum(total);
    }
    if (threadIdx.x == 0) {
        statistics[0] = most_of_all;
        statistics[1] = statistics[1] * expf(before - base) + sum;
        if (0 <= target && target < tile) {
            const float logit = logits[target] + (bias != nullptr ? get(bias[target]) : 0.0f);
            statistics[2] = each != 0.0f ? statistics[2] + own * logit : logit;
        }
        if (each != 0.0f) {
            statistics[2] += each * total;
        }
    }
}

// d = scale (softmax − own for the label − each); 0 without a label. From complete statistics, (R, 4); d: (rows,
// tile); places: as above. `weighed`: the third float of a row's statistics is a factor of its d.
// launch: grid (rows), block (256)
extern "C" __global__ void __launch_bounds__(256)
    score_gradient(T* d, const float* statistics, const float* logits, const T* bias, const int* places,
                   int rows, int tile, int stride, int first, float scale, float own, float each, int weighed) {
    const long long row = blockIdx.x, place = places[row];
    const int label = place < 0 ? -1 : __float_as_int(statistics[4 * place + 3]), target = label - first;
    const bool is_labelled = label >= 0;
    const float lse = is_labelled ? statistics[4 * place] + logf(statistics[4 * place + 1]) : 0.0f;
    const float factor = weighed != 0 && is_labelled ? scale * statistics[4 * place + 2] : scale;
    for (int column = 4 * threadIdx.x; column < tile; column += 4 * blockDim.x) {
        Four values = {};
        if (is_labelled) {
            values = biased(logits + row * stride, bias, column, tile);
            for (int i = 0; i < 4; ++i) {
                values.of[i] = factor * (expf(values.of[i] - lse) - (column + i == target ? own : 0.0f) - each);
            }
        }
        write(d + row * stride + column, values, min(4, tile - column));
    }
}

// Makes logits of products, in place: scale x, or cap tanh(scale x / cap) if `cap` is not 0. y: (rows, columns), rows
// `stride` apart.
// launch: grid (rows, ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void form_logits(float* y, int rows, int columns, int stride, float scale, float cap) {
    const int column = my_column(), count = columns - column;
    if (count <= 0) {
        return;
    }
    y += static_cast<long long>(blockIdx.x) * stride + column;
    Four value = read(y, count);
    for (int i = 0; i < 4; ++i) {
        const float scaled = scale * value.of[i];
        value.of[i] = cap == 0.0f ? scaled : cap * tanhf(scaled / cap);
    }
    write(y, value, count);
}

// The gradient of the products, in place, from that of the logits. d, logits: (rows, columns), rows `stride` apart.
// launch: grid (rows, ceil(columns / 1024)), block (threads(columns))
extern "C" __global__ void form_gradient(T* d, const float* logits, int rows, int columns, int stride,
                                         float scale, float cap) {
    const int column = my_column(), count = columns - column;
    if (count <= 0) {
        return;
    }
    const long long at = static_cast<long long>(blockIdx.x) * stride + column;
    Four value = read(d + at, count);
    const Four logit = read(logits + at, count);
    for (int i = 0; i < 4; ++i) {
        const float part = cap == 0.0f ? 0.0f : logit.of[i] / cap;
        value.of[i] *= scale * (1.0f - part) * (1.0f + part);
    }
    write(d + at, value, count);
}
