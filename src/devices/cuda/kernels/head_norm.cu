// Norms of each head of queries and keys by root mean square (Henry et al. 2020, as in Qwen3). A warp takes
// a head of a row.

constexpr int HEADS_A_BLOCK = 8;

// The row and the head of this warp, if each row has `heads`.
struct Place {
    long long row;
    int head;
};

__device__ inline Place place_of_warp(int heads) {
    const long long index = static_cast<long long>(blockIdx.x) * HEADS_A_BLOCK + threadIdx.x / WARP;
    return {index / heads, static_cast<int>(index % heads)};
}

// y = (offset + gamma) x rstd by head; values are copied. y, x: (rows, (H + 2K) D); statistics: (rows, H + K), rstd.
// launch: grid (ceil(rows (heads + 2 kv_heads) / 8)), block (256)
extern "C" __global__ void head_norm(T* y, float* statistics, const T* x, const T* gamma_q, const T* gamma_k,
                                     int rows, float epsilon, float offset, Attention size) {
    const int normed = size.heads + size.kv_heads, all = normed + size.kv_heads, channels = size.head_size;
    const auto [row, head] = place_of_warp(all);
    if (row >= rows) {
        return;
    }
    const int first = 4 * (threadIdx.x % WARP), step = 4 * WARP;
    y += (row * all + head) * channels;
    x += (row * all + head) * channels;
    if (head >= normed) {
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
            value.of[i] = value.of[i] * rstd * (offset + scale.of[i]);
        }
        write(y + column, value, count);
    }
    if (threadIdx.x % WARP == 0) {
        statistics[row * normed + head] = rstd;
    }
}

// The sum of dgamma over every eighth head, beginning with this warp's, in order. dy and x begin at the first head and
// at this lane's channels.
template <bool PACKED>
__device__ inline Four sum_of_heads(const T* dy, const T* x, const float* statistics, int rows, int heads,
                                    const Attention& size, int count) {
    const int normed = size.heads + size.kv_heads, all = normed + size.kv_heads;
    Four sum = {};
#pragma unroll 4
    for (int index = threadIdx.x / WARP; index < rows * heads; index += HEADS_A_BLOCK) {
        const int row = index / heads, head = index % heads;
        const long long at = (static_cast<long long>(row) * all + head) * size.head_size;
        const float rstd = statistics[static_cast<long long>(row) * normed + head];
        const Four d = read_as<PACKED>(dy + at, count), value = read_as<PACKED>(x + at, count);
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
                                           int rows, int chunk, Attention size) {
    alignas(16) __shared__ float sums[HEADS_A_BLOCK][4 * WARP];
    const int normed = size.heads + size.kv_heads, all = normed + size.kv_heads, channels = size.head_size;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool is_key = blockIdx.y == 1;
    const int heads = is_key ? size.kv_heads : size.heads, first_head = is_key ? size.heads : 0;
    const long long from = static_cast<long long>(blockIdx.x) * chunk;
    const int own_rows = static_cast<int>(min(static_cast<long long>(chunk), rows - from));
    statistics += from * normed + first_head;
    dy += (from * all + first_head) * channels;
    x += (from * all + first_head) * channels;
    parts += (2LL * blockIdx.x + blockIdx.y) * channels;

    for (int first = 0; first < channels; first += 4 * WARP) {
        const int column = first + 4 * lane, count = channels - column;
        const T *const own_dy = dy + column, *const own_x = x + column;
        const bool packed = are_packed(own_dy, count, channels) && are_packed(own_x, count, channels);
        const Four sum = packed
                             ? sum_of_heads<true>(own_dy, own_x, statistics, own_rows, heads, size, count)
                             : sum_of_heads<false>(own_dy, own_x, statistics, own_rows, heads, size, count);
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

// dx = rstd (g - n mean(g n)), with g = dy (offset + gamma) and n = x rstd. dx holds dy before; values' dy stays.
// launch: grid (ceil(rows (heads + kv_heads) / 8)), block (256)
extern "C" __global__ void head_norm_backward(T* dx, const T* x, const float* statistics, const T* gamma_q,
                                              const T* gamma_k, int rows, float offset, Attention size) {
    const int normed = size.heads + size.kv_heads, all = normed + size.kv_heads, channels = size.head_size;
    const auto [row, head] = place_of_warp(normed);
    if (row >= rows) {
        return;
    }
    const int first = 4 * (threadIdx.x % WARP), step = 4 * WARP;
    const T* const gamma = head < size.heads ? gamma_q : gamma_k;
    const float rstd = statistics[row * normed + head];
    dx += (row * all + head) * channels;
    x += (row * all + head) * channels;

    float sum = 0.0f;
    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Four d = read(dx + column, count), scale = read(gamma + column, count);
        const Four value = read(x + column, count);
        for (int i = 0; i < 4; ++i) {
            sum += d.of[i] * (offset + scale.of[i]) * (value.of[i] * rstd);
        }
    }
    const float mean = warp_sum(sum) / channels;
    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Four scale = read(gamma + column, count), value = read(x + column, count);
        Four d = read(dx + column, count);
        for (int i = 0; i < 4; ++i) {
            d.of[i] = rstd * (d.of[i] * (offset + scale.of[i]) - value.of[i] * rstd * mean);
        }
        write(dx + column, d, count);
    }
}
