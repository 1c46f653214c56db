// Norms over the channels of each row: by mean and deviation (Ba et al. 2016), or by root mean square alone
// (Zhang and Sennrich 2019), which is the same with a mean of 0. Rows are read again rather than kept: they
// are in the nearest cache.

// y = (offset + gamma) (x - mean) rstd + beta, which may be null. statistics: (rows, 2), mean and rstd. (CUDA has a
// function named norm.)
// launch: grid (rows), block (threads(4 channels / wide))
extern "C" __global__ void norm_forward(T* y, float* statistics, const T* x, const T* gamma, const T* beta,
                                        int rows, int channels, float epsilon, int rms, float offset) {
    const long long row = blockIdx.x;
    const int first = WIDE * threadIdx.x, step = WIDE * blockDim.x;
    y += row * channels;
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
        statistics[2 * row] = mean;
        statistics[2 * row + 1] = rstd;
    }
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
