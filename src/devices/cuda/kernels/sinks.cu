// Attention's sinks: a score a head that joins the softmax and has no value. lse: the log-sum-exp of each query and
// head, sequence by sequence, and in a sequence head by head.

__device__ inline long long statistic(const Sequence& sequence, int heads, int head, int row) {
    return static_cast<long long>(sequence.first) * heads + static_cast<long long>(head) * sequence.count + row -
           sequence.first;
}

// y = y sigmoid(lse - sink). y: (rows, H D); sinks: (H).
// launch: grid (rows, ceil(width / 1024)), block (threads(width))
extern "C" __global__ void sink_outputs(T* y, const float* lse, const T* sinks, const int* starts, int width,
                                        Attention size) {
    const int row = blockIdx.x, column = my_column(), some = width - column;
    if (some <= 0) {
        return;
    }
    const Sequence sequence = sequence_of(starts, size.sequences, size.rows, row);
    T* const to = y + static_cast<long long>(row) * width + column;
    Four values = read(to, some);
    for (int i = 0; i < 4; ++i) {
        if (i < some) {
            const int head = (column + i) / size.head_size;
            const float score = lse[statistic(sequence, size.heads, head, row)] - get(sinks[head]);
            values.of[i] *= 1.0f / (1.0f + expf(-score));
        }
    }
    write(to, values, some);
}

// lse = ln(exp(lse) + exp(sink)).
// launch: grid (ceil(n / 256)), block (256)
extern "C" __global__ void sink_statistics(float* lse, const T* sinks, const int* starts, long long n, Attention size) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= n) {
        return;
    }
    const Sequence sequence = sequence_of(starts, size.sequences, size.rows, static_cast<int>(at / size.heads));
    const long long place = at - static_cast<long long>(sequence.first) * size.heads;
    const float own = lse[at], sink = get(sinks[place / sequence.count]);
    lse[at] = (own > sink ? own : sink) + log1pf(expf(-fabsf(own - sink)));
}

// dsinks (+)= -sum of exp(sink - lse) times the product of dy and y, over the rows. A block has a head; its warps take
// rows in turn.
// launch: grid (heads), block (256)
extern "C" __global__ void sink_backward(float* dsinks, const T* dy, const T* y, const float* lse, const T* sinks,
                                         const int* starts, int accumulate, Attention size) {
    const int head = blockIdx.x, lane = threadIdx.x % WARP, channels = size.head_size;
    const float sink = get(sinks[head]);
    float sum = 0.0f;
    for (int row = threadIdx.x / WARP; row < size.rows; row += blockDim.x / WARP) {
        const long long at = (static_cast<long long>(row) * size.heads + head) * channels;
        float product = 0.0f;
        for (int column = 4 * lane; column < channels; column += 4 * WARP) {
            const int some = channels - column;
            const Four a = read(dy + at + column, some), b = read(y + at + column, some);
            for (int i = 0; i < 4; ++i) {
                product = fmaf(a.of[i], b.of[i], product);
            }
        }
        const Sequence sequence = sequence_of(starts, size.sequences, size.rows, row);
        sum = fmaf(expf(sink - lse[statistic(sequence, size.heads, head, row)]), product, sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        dsinks[head] = accumulate ? dsinks[head] - sum : -sum;
    }
}
