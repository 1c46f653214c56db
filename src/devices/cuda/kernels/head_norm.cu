// Norms of queries and keys (Henry et al. 2020): of each head by root mean square (0), of all heads at once (1), or of
// each head by mean and deviation, with scales of its own (2); and of the heads of values. A warp takes a part of a row
// that is normed by itself.

constexpr int PARTS_A_BLOCK = 8;

constexpr int LAYER_NORM = 2;

// What values are: copied, normed without scales, or the keys without their scales (then the input has no values).
constexpr int NORMED = 1, OF_KEYS = 2;

// The parts of a row: those of queries, then those of keys, then as many of values.
struct NormParts {
    int queries, keys, query_channels, key_channels, norm, values;

    __device__ int scaled() const { return queries + keys; }
    __device__ int all() const { return queries + 2 * keys; }
    // Those that have statistics: rstd of each, and behind them the means, if the norm subtracts these.
    __device__ int normed() const { return queries + (values == NORMED ? 2 : 1) * keys; }
    __device__ int statistics() const { return (norm == LAYER_NORM ? 2 : 1) * normed(); }
    __device__ int channels(int part) const { return part < queries ? query_channels : key_channels; }
    __device__ int first(int part) const {
        return min(part, queries) * query_channels + max(part - queries, 0) * key_channels;
    }
    __device__ int width() const { return first(all()); }
    __device__ int input_width() const { return first(values == OF_KEYS ? scaled() : all()); }
    // Where the scales of a part begin among those of its kind.
    __device__ int first_scale(int part) const {
        const bool is_own = norm == LAYER_NORM && part < scaled();
        return is_own ? (part < queries ? part : part - queries) * channels(part) : 0;
    }
};

// The row and the part of this warp, if each row has `parts`.
struct Place {
    long long row;
    int part;
};

__device__ inline Place place_of_warp(int parts) {
    const long long index = static_cast<long long>(blockIdx.x) * PARTS_A_BLOCK + threadIdx.x / WARP;
    return {index / parts, static_cast<int>(index % parts)};
}

// y = (offset + gamma) (x - mean) rstd by part; the mean of a norm by root mean square is 0.
// launch: grid (ceil(rows (queries + 2 keys) / 8)), block (256)
extern "C" __global__ void head_norm(T* y, float* statistics, const T* x, const T* gamma_q, const T* gamma_k,
                                     int rows, float epsilon, float offset, NormParts parts) {
    const auto [row, part] = place_of_warp(parts.all());
    if (row >= rows) {
        return;
    }
    const int channels = parts.channels(part), first = 4 * (threadIdx.x % WARP), step = 4 * WARP;
    const bool is_scaled = part < parts.scaled();
    y += row * parts.width() + parts.first(part);
    x += row * parts.input_width() + parts.first(parts.values == OF_KEYS && !is_scaled ? part - parts.keys : part);
    if (!is_scaled && parts.values == 0) {
        for (int column = first; column < channels; column += step) {
            write(y + column, read(x + column, channels - column), channels - column);
        }
        return;
    }
    float mean = 0.0f;
    if (parts.norm == LAYER_NORM) {
        float sum = 0.0f;
        for (int column = first; column < channels; column += step) {
            const Four value = read(x + column, channels - column);
            for (int i = 0; i < 4; ++i) {
                sum += value.of[i];
            }
        }
        mean = warp_sum(sum) / channels;
    }
    float squares = 0.0f;
    for (int column = first; column < channels; column += step) {
        const Four value = read(x + column, channels - column);
        for (int i = 0; i < 4; ++i) {
            const float off = column + i < channels ? value.of[i] - mean : 0.0f;
            squares += off * off;
        }
    }
    const float rstd = 1.0f / sqrtf(warp_sum(squares) / channels + epsilon);
    const T* const gamma = (part < parts.queries ? gamma_q : gamma_k) + parts.first_scale(part);
    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Four scale = read(gamma + column, count);
        Four value = read(x + column, count);
        for (int i = 0; i < 4; ++i) {
            value.of[i] = (value.of[i] - mean) * rstd * (is_scaled ? offset + scale.of[i] : 1.0f);
        }
        write(y + column, value, count);
    }
    const int normed = parts.normed();
    if (threadIdx.x % WARP == 0 && part < normed) {
        statistics += row * parts.statistics();
        statistics[part] = rstd;
        if (parts.norm == LAYER_NORM) {
            statistics[normed + part] = mean;
        }
    }
}

// The sum of dgamma over every eighth part, beginning with this warp's, in order, of `count` parts a row. dy, x and
// statistics begin at the first part, dy and x at this lane's channels.
template <bool PACKED>
__device__ inline Four sum_of_parts(const T* dy, const T* x, const float* statistics, int rows, int count,
                                    int channels, const NormParts& parts, int columns) {
    const long long width = parts.width(), of_input = parts.input_width(), of_row = parts.statistics();
    const int normed = parts.normed();
    Four sum = {};
#pragma unroll 4
    for (int index = threadIdx.x / WARP; index < rows * count; index += PARTS_A_BLOCK) {
        const int row = index / count, part = index % count, at = part * channels;
        const float* const own = statistics + row * of_row + part;
        const float rstd = own[0], mean = parts.norm == LAYER_NORM ? own[normed] : 0.0f;
        const Four d = read_as<PACKED>(dy + row * width + at, columns);
        const Four value = read_as<PACKED>(x + row * of_input + at, columns);
        for (int i = 0; i < 4; ++i) {
            sum.of[i] += d.of[i] * ((value.of[i] - mean) * rstd);
        }
    }
    return sum;
}

// Partial sums of dgamma over `chunk` rows: of queries (blockIdx.y = 0) and of keys; or of each part, if it has scales
// of its own. sums: (ceil(rows / chunk), scales of queries and of keys).
// launch: grid (ceil(rows / chunk), kinds), block (256)
extern "C" __global__ void head_norm_parts(float* sums, const T* dy, const T* x, const float* statistics, int rows,
                                           int chunk, int kinds, NormParts parts) {
    alignas(16) __shared__ float of_warps[PARTS_A_BLOCK][4 * WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, kind = blockIdx.y;
    const bool is_own = parts.norm == LAYER_NORM;
    const int part = is_own || kind == 0 ? kind : parts.queries;
    const int count = is_own ? 1 : kind == 0 ? parts.queries : parts.keys;
    const int channels = parts.channels(part);
    const int first_sum = is_own ? parts.first(part) : kind * parts.query_channels;
    const int all_sums = is_own ? parts.first(parts.scaled()) : parts.query_channels + parts.key_channels;
    const long long from = static_cast<long long>(blockIdx.x) * chunk;
    const int own_rows = static_cast<int>(min(static_cast<long long>(chunk), rows - from));
    statistics += from * parts.statistics() + part;
    dy += from * parts.width() + parts.first(part);
    x += from * parts.input_width() + parts.first(part);
    sums += static_cast<long long>(blockIdx.x) * all_sums + first_sum;

    for (int first = 0; first < channels; first += 4 * WARP) {
        const int column = first + 4 * lane, columns = channels - column;
        const T *const own_dy = dy + column, *const own_x = x + column;
        const bool are_even = channels % 4 == 0 && parts.width() % 4 == 0 && parts.input_width() % 4 == 0;
        const bool packed = are_even && is_packed(own_dy, columns) && is_packed(own_x, columns);
        const Four sum =
            packed ? sum_of_parts<true>(own_dy, own_x, statistics, own_rows, count, channels, parts, columns)
                   : sum_of_parts<false>(own_dy, own_x, statistics, own_rows, count, channels, parts, columns);
        write(&of_warps[warp][4 * lane], sum, 4);
        __syncthreads();
        for (int at = threadIdx.x; at < 4 * WARP && first + at < channels; at += blockDim.x) {
            float total = 0.0f;
            for (int i = 0; i < PARTS_A_BLOCK; ++i) {
                total += of_warps[i][at];
            }
            sums[first + at] = total;
        }
        __syncthreads();
    }
}

// dx = rstd (g - mean(g) - n mean(g n)), with g = dy (offset + gamma) and n = (x - mean) rstd; a norm by root mean
// square does not subtract mean(g). dx holds dy before. The dy of plain values stays; that of values that are the keys'
// is added to the keys' g. Without normed values, queries + keys suffice.
// launch: grid (ceil(rows (queries + 2 keys) / 8)), block (256)
extern "C" __global__ void head_norm_backward(T* dx, const T* x, const float* statistics, const T* gamma_q,
                                              const T* gamma_k, int rows, float offset, NormParts parts) {
    const int normed = parts.normed();
    const Place place = place_of_warp(normed);
    const int part = place.part;
    if (place.row >= rows) {
        return;
    }
    const int channels = parts.channels(part), first = 4 * (threadIdx.x % WARP), step = 4 * WARP;
    const T* const gamma = (part < parts.queries ? gamma_q : gamma_k) + parts.first_scale(part);
    statistics += place.row * parts.statistics() + part;
    const bool has_mean = parts.norm == LAYER_NORM;
    const float rstd = statistics[0], mean = has_mean ? statistics[normed] : 0.0f;
    dx += place.row * parts.width() + parts.first(part);
    x += place.row * parts.input_width() + parts.first(part);
    const bool is_scaled = part < parts.scaled(), has_value = parts.values == OF_KEYS && part >= parts.queries;
    const T* const of_value = dx + parts.keys * channels;
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

    float sum = 0.0f, sum_of_g = 0.0f;
    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Four g = g_at(column, count), value = read(x + column, count);
        for (int i = 0; i < 4; ++i) {
            sum += g.of[i] * ((value.of[i] - mean) * rstd);
            sum_of_g += g.of[i];
        }
    }
    const float g_n = warp_sum(sum) / channels, g_mean = has_mean ? warp_sum(sum_of_g) / channels : 0.0f;
    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Four value = read(x + column, count);
        Four g = g_at(column, count);
        for (int i = 0; i < 4; ++i) {
            g.of[i] = rstd * (g.of[i] - g_mean - (value.of[i] - mean) * rstd * g_n);
        }
        write(dx + column, g, count);
    }
}
