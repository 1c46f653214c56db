// Norms over the channels of each row: by mean and deviation (Ba et al. 2016), or by root mean square alone
// (Zhang and Sennrich 2019), which is the same with a mean of 0. Rows are read twice and not kept in registers: they
// are in the L1 cache.

// The arguments of a norm of rows.
struct Norm {
    const T *gamma, *beta; // beta may be null
    int channels;
    float epsilon;
    int rms;
    float offset;
};

// y = (offset + gamma) (x - mean) rstd + beta, of a block's row. statistics: mean and rstd.
__device__ inline void norm_row(T* y, float* statistics, const T* x, float mean, const Norm& norm) {
    const auto [gamma, beta, channels, epsilon, rms, offset] = norm;
    const int first = WIDE * threadIdx.x, step = WIDE * blockDim.x;
    float squares = 0.0f;
    for (int column = first; column < channels; column += step) {
        const Some<WIDE> value = read<WIDE>(x + column, channels - column);
        for (int i = 0; i < WIDE; ++i) {
            const float off = column + i < channels ? value.of[i] - mean : 0.0f;
            squares += off * off;
        }
    }
    const float rstd = 1.0f / sqrtf(block_sum(squares) / channels + epsilon);

    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Some<WIDE> scale = read<WIDE>(gamma + column, count);
        const Some<WIDE> shift = beta != nullptr ? read<WIDE>(beta + column, count) : Some<WIDE>{};
        Some<WIDE> value = read<WIDE>(x + column, count);
        for (int i = 0; i < WIDE; ++i) {
            value.of[i] = (value.of[i] - mean) * rstd * (offset + scale.of[i]) + shift.of[i];
        }
        write(y + column, value, count);
    }
    if (threadIdx.x == 0) {
        statistics[0] = mean;
        statistics[1] = rstd;
    }
}

// y = norm(x). statistics: (rows, 2), mean and rstd. (CUDA has a function named norm.)
// launch: grid (rows), block (threads(4 channels / wide))
extern "C" __global__ void norm_forward(T* y, float* statistics, const T* x, const T* gamma, const T* beta,
                                        int rows, int channels, float epsilon, int rms, float offset) {
    const long long row = blockIdx.x;
    const int first = WIDE * threadIdx.x, step = WIDE * blockDim.x;
    x += row * channels;
    float mean = 0.0f;
    if (!rms) {
        float sum = 0.0f;
        for (int column = first; column < channels; column += step) {
            const Some<WIDE> value = read<WIDE>(x + column, channels - column);
            for (int i = 0; i < WIDE; ++i) {
                sum += value.of[i];
            }
        }
        mean = block_sum(sum) / channels;
    }
    norm_row(y + row * channels, statistics + 2 * row, x, mean, {gamma, beta, channels, epsilon, rms, offset});
}

// sum = a + dropout(x), y = norm(sum): the operations of `drop` and `norm_forward`. y may be x; sum may be a.
// launch: grid (rows), block (threads(4 channels / wide))
extern "C" __global__ void residual_norm(T* y, float* statistics, T* sum, const T* x, const T* a, const T* gamma,
                                         const T* beta, const int* starts, int sequences, int rows, int channels,
                                         float epsilon, int rms, float offset, Dropout dropout) {
    const long long row = blockIdx.x, at = row * channels;
    float total = 0.0f;
    for (int column = WIDE * threadIdx.x; column < channels; column += WIDE * blockDim.x) {
        const int count = channels - column;
        Some<WIDE> value = read<WIDE>(x + at + column, count);
        apply_mask(value, dropout, starts, sequences, rows, blockIdx.x, column);
        const Some<WIDE> other = read<WIDE>(a + at + column, count);
        for (int i = 0; i < WIDE; ++i) {
            value.of[i] += other.of[i];
            total += get(put(value.of[i])); // 0 past the last column
        }
        write(sum + at + column, value, count);
    }
    const float mean = rms ? 0.0f : block_sum(total) / channels;
    norm_row(y + at, statistics + 2 * row, sum + at, mean, {gamma, beta, channels, epsilon, rms, offset});
}

// dx = residual (0, if null) + rstd (g - mean(g) - n mean(g n)), with g = dy (offset + gamma) and n = (x - mean)
// rstd; by root mean square the first mean is 0. dx may be residual or dy.
// launch: grid (rows), block (threads(4 channels / wide))
extern "C" __global__ void norm_backward(T* dx, const T* residual, const T* dy, const T* x,
                                         const float* statistics, const T* gamma, int rows, int channels,
                                         int rms, float offset) {
    const long long row = blockIdx.x;
    const int first = WIDE * threadIdx.x, step = WIDE * blockDim.x;
    const float mean = statistics[2 * row], rstd = statistics[2 * row + 1];
    dx += row * channels;
    dy += row * channels;
    x += row * channels;

    float g_sum = 0.0f, gn_sum = 0.0f;
    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Some<WIDE> d = read<WIDE>(dy + column, count), scale = read<WIDE>(gamma + column, count);
        const Some<WIDE> value = read<WIDE>(x + column, count);
        for (int i = 0; i < WIDE; ++i) {
            const float g = d.of[i] * (offset + scale.of[i]);
            g_sum += g;
            gn_sum += g * ((value.of[i] - mean) * rstd);
        }
    }
    const float g_mean = rms ? 0.0f : block_sum(g_sum) / channels;
    const float gn_mean = block_sum(gn_sum) / channels;

    for (int column = first; column < channels; column += step) {
        const int count = channels - column;
        const Some<WIDE> d = read<WIDE>(dy + column, count), scale = read<WIDE>(gamma + column, count);
        const Some<WIDE> value = read<WIDE>(x + column, count);
        Some<WIDE> result = residual != nullptr ? read<WIDE>(residual + row * channels + column, count) : Some<WIDE>{};
        for (int i = 0; i < WIDE; ++i) {
            const float g = d.of[i] * (offset + scale.of[i]), n = (value.of[i] - mean) * rstd;
            result.of[i] += rstd * (g - g_mean - n * gn_mean);
        }
        write(dx + column, result, count);
    }
}

struct Gradients {
    Four gamma, beta;
};

template <bool PACKED>
__device__ inline Gradients sum_of_rows(const T* dy, const T* x, const float* statistics, long long from,
                                        long long to, int channels, int count) {
    Gradients sum = {};
#pragma unroll 4
    for (long long row = from; row < to; ++row) {
        const float mean = statistics[2 * row], rstd = statistics[2 * row + 1];
        const Four d = read_as<PACKED>(dy + row * channels, count);
        const Four value = read_as<PACKED>(x + row * channels, count);
        for (int i = 0; i < 4; ++i) {
            sum.gamma.of[i] += d.of[i] * ((value.of[i] - mean) * rstd);
            sum.beta.of[i] += d.of[i];
        }
    }
    return sum;
}

// Partial sums of dgamma and dbeta, `chunk` rows each. parts: (ceil(rows / chunk), 2, channels).
// launch: grid (ceil(rows / chunk), ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void norm_parts(float* parts, const T* dy, const T* x, const float* statistics,
                                      int rows, int channels, int chunk) {
    const int column = my_column(), count = channels - column;
    if (count <= 0) {
        return;
    }
    const long long from = static_cast<long long>(blockIdx.x) * chunk;
    const long long to = min(from + chunk, static_cast<long long>(rows));
    dy += column;
    x += column;
    const bool packed = are_packed(dy, count, channels) && are_packed(x, count, channels);
    const Gradients sum = packed ? sum_of_rows<true>(dy, x, statistics, from, to, channels, count)
                                 : sum_of_rows<false>(dy, x, statistics, from, to, channels, count);
    parts += 2LL * blockIdx.x * channels + column;
    write(parts, sum.gamma, count);
    write(parts + channels, sum.beta, count);
}
