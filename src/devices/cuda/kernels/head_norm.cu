// Norms of each head of queries and keys by root mean square (Henry et al. 2020, as in Qwen3), and of values. A warp
// takes a head of a row.

constexpr int HEADS_A_BLOCK = 8;

// What values are: copied, normed without scales, or the keys without their scales (then the input has no values).
constexpr int NORMED = 1, OF_KEYS = 2;

// Heads of a row of the input; heads that have statistics.
__device__ inline int input_heads(const Attention& size, int values) {
    return size.heads + (values == OF_KEYS ? 1 : 2) * size.kv_heads;
}

__device__ inline int normed_heads(const Attention& size, int values) {
    return size.heads + (values == NORMED ? 2 : 1) * size.kv_heads;
}

// The row and the head of this warp, if each row has `heads`.
struct Place {
    long long row;
    int head;
};

__device__ inline Place place_of_warp(int heads) {
    const long long index = static_cast<long long>(blockIdx.x) * HEADS_A_BLOCK + threadIdx.x / WARP;
    return {index / heads, static_cast<int>(index % heads)};
}

// y = (offset + gamma) x rstd by head. y: (rows, (H + 2K) D); statistics: rstd.
// launch: grid (ceil(rows (heads + 2 kv_heads) / 8)), block (256)
extern "C" __global__ void head_norm(T* y, float* statistics, const T* x, const T* gamma_q, const T* gamma_k,
                                     int rows, float epsilon, float offset, int values, Attention size) {
    const int scaled = size.heads + size.kv_heads, all = scaled + size.kv_heads, channels = size.head_size;
    const int normed = normed_heads(size, values);
    const auto [row, head] = place_of_warp(all);
    if (row >= rows) {
        return;
    }
    const int first = 4 * (threadIdx.x % WARP), step = 4 * WARP;
    y += (row * all + head) * channels;
    const int read_head = values == OF_KEYS && head >= scaled ? head - size.kv_heads : head;
    x += (row * input_heads(size, values) + read_head) * channels;
    if (head >= scaled && values == 0) {
        for (int column = first; column < channels; column += step) {
            write(y + column, read(x + column, channels - column), channels - column);
        }
        return;
    }
    float squares = 0.0f;
    for (int column = first; column < channels; column += step) {
        const Four value = read(x + column, channels - column);
        for (int i = 0; i < 4; ++i) {
            squares += value.of[i] * value.of[i];
        }
    }
    const float rstd = 1.0f / sqrtf(warp_sum(squares) / channels + epsilon);
    const T* const gamma = head < size.heads ? gamma_q : gamma_k;
    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Four scale = read(gamma + column, count);
        Four value = read(x + column, count);
        for (int i = 0; i < 4; ++i) {
            value.of[i] = value.of[i] * rstd * (head < scaled ? offset + scale.of[i] : 1.0f);
        }
        write(y + column, value, count);
    }
    if (threadIdx.x % WARP == 0 && head < normed) {
        statistics[row * normed + head] = rstd;
    }
}

// The sum of dgamma over every eighth head, beginning with this warp's, in order. dy and x begin at the first head and
// at this lane's channels.
template <bool PACKED>
__device__ inline Four sum_of_heads(const T* dy, const T* x, const float* statistics, int rows, int heads, int values,
                                    const Attention& size, int count) {
    const int all = size.heads + 2 * size.kv_heads, normed = normed_heads(size, values);
    const int of_input = input_heads(size, values);
    Four sum = {};
#pragma unroll 4
    for (int index = threadIdx.x / WARP; index < rows * heads; index += HEADS_A_BLOCK) {
        const int row = index / heads, head = index % heads;
        const long long at = (static_cast<long long>(row) * all + head) * size.head_size;
        const long long at_input = (static_cast<long long>(row) * of_input + head) * size.head_size;
        const float rstd = statistics[static_cast<long long>(row) * normed + head];
        const Four d = read_as<PACKED>(dy + at, count), value = read_as<PACKED>(x + at_input, count);
        for (int i = 0; i < 4; ++i) {
            sum.of[i] += d.of[i] * (value.of[i] * rstd);
        }
    }
    return sum;
}

// Partial sums of dgamma over the heads of `chunk` rows, of queries (blockIdx.y = 0) and of keys.
// parts: (ceil(rows / chunk), 2, D).
// launch: grid (ceil(rows / chunk), 2), block (256)
extern "C" __global__ void head_norm_parts(float* parts, const T* dy, const T* x, const float* statistics,
                                           int rows, int chunk, int values, Attention size) {
    alignas(16) __shared__ float sums[HEADS_A_BLOCK][4 * WARP];
    const int all = size.heads + 2 * size.kv_heads, channels = size.head_size;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool is_key = blockIdx.y == 1;
    const int heads = is_key ? size.kv_heads : size.heads, first_head = is_key ? size.heads : 0;
    const long long from = static_cast<long long>(blockIdx.x) * chunk;
    const int own_rows = static_cast<int>(min(static_cast<long long>(chunk), rows - from));
    statistics += from * normed_heads(size, values) + first_head;
    dy += (from * all + first_head) * channels;
    x += (from * input_heads(size, values) + first_head) * channels;
    parts += (2LL * blockIdx.x + blockIdx.y) * channels;

    for (int first = 0; first < channels; first += 4 * WARP) {
        const int column = first + 4 * lane, count = channels - column;
        const T *const own_dy = dy + column, *const own_x = x + column;
        const bool packed = are_packed(own_dy, count, channels) && are_packed(own_x, count, channels);
        const Four sum = packed
                             ? sum_of_heads<true>(own_dy, own_x, statistics, own_rows, heads, values, size, count)
                             : sum_of_heads<false>(own_dy, own_x, statistics, own_rows, heads, values, size, count);
        write(&sums[warp][4 * lane], sum, 4);
        __syncthreads();
        for (int at = threadIdx.x; at < 4 * WARP && first + at < channels; at += blockDim.x) {
            float total = 0.0f;
            for (int i = 0; i < HEADS_A_BLOCK; ++i) {
                total += sums[i][at];
            }
            parts[first + at] = total;
        }
        __syncthreads();
    }
}

// dx = rstd (g - n mean(g n)), with g = dy (offset + gamma) and n = x rstd. dx holds dy before. The dy of plain values
// stays; that of values that are the keys' is added to the keys' g. Without normed values, heads + kv_heads suffice.
// launch: grid (ceil(rows (heads + 2 kv_heads) / 8)), block (256)
extern "C" __global__ void head_norm_backward(T* dx, const T* x, const float* statistics, const T* gamma_q,
                                              const T* gamma_k, int rows, float offset, int values, Attention size) {
    const int scaled = size.heads + size.kv_heads, all = scaled + size.kv_heads, channels = size.head_size;
    const int normed = normed_heads(size, values);
    const auto [row, head] = place_of_warp(normed);
    if (row >= rows) {
        return;
    }
    const int first = 4 * (threadIdx.x % WARP), step = 4 * WARP;
    const T* const gamma = head < size.heads ? gamma_q : gamma_k;
    const float rstd = statistics[row * normed + head];
    dx += (row * all + head) * channels;
    x += (row * input_heads(size, values) + head) * channels;
    const bool is_scaled = head < scaled, has_value = values == OF_KEYS && head >= size.heads;
    const T* const of_value = dx + size.kv_heads * channels;
    const auto g_at = [&](int column, int count) {
        Four d = read(dx + column, count);
        const Four scale = read(gamma + column, count);
        for (int i = 0; i < 4; ++i) {
            d.of[i] *= is_scaled ? offset + scale.of[i] : 1.0f;
        }
        if (has_value) {
            const Four other = read(of_value + column, count);
            for (int i = 0; i < 4; ++i) {
                d.of[i] += other.of[i];
            }
        }
        return d;
    };

    float sum = 0.0f;
    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Four g = g_at(column, count), value = read(x + column, count);
        for (int i = 0; i < 4; ++i) {
            sum += g.of[i] * (value.of[i] * rstd);
        }
    }
    const float mean = warp_sum(sum) / channels;
    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Four value = read(x + column, count);
        Four g = g_at(column, count);
        for (int i = 0; i < 4; ++i) {
            g.of[i] = rstd * (g.of[i] - value.of[i] * rstd * mean);
        }
        write(dx + column, g, count);
    }
}
