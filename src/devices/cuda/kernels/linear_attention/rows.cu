// Linear attention by the gated delta rule: sizes, the factors of positions, the short convolution, and the norm of the
// output with its gates.
//
// A row of the projection has M = 2 G D_k + H D_v inputs of the convolution (queries, keys, values), H logits of beta, H
// steps a, and H D_v gates z. What rows leave to later ones of their sequence is S floats: (taps - 1, M) inputs of the
// convolution, or gradients of its sums, and (H, D_v, D_k) states.

// Rows of B sequences, each with `past` positions before; G heads of keys, H heads of values.
struct Linear {
    int sequences, rows, past, key_heads, value_heads, key_size, value_size, taps;

    __device__ int keys() const { return key_heads * key_size; }
    __device__ int values() const { return value_heads * value_size; }
    __device__ int mixed() const { return 2 * keys() + values(); }
    __device__ int remembered() const { return mixed() + 2 * value_heads; }
    __device__ int projected() const { return remembered() + values(); }
    __device__ long long inputs() const { return (taps - 1LL) * mixed(); }
    __device__ long long states() const { return static_cast<long long>(values()) * key_size; }
    __device__ long long carried() const { return inputs() + states(); }
};

// Where a row lies.
struct Row {
    Sequence sequence;
    int at; // in its sequence
    int before, behind; // rows of its document before and behind it, wherever they are
};

constexpr int NO_END = 0x7FFFFFFF;

// pasts: positions of each sequence before its first row; null: all have size.past. documents: (rows, 2) or null.
__device__ inline int past_of(const int* pasts, const Linear& size, int sequence) {
    return pasts != nullptr ? pasts[sequence] : size.past;
}

__device__ inline Row row_of(const int* starts, const unsigned* documents, const int* pasts, const Linear& size,
                             int row) {
    const Sequence sequence = sequence_of(starts, size.sequences, size.rows, row);
    const int past = past_of(pasts, size, sequence.index), position = past + row - sequence.first;
    const int before = position_of(documents, past, sequence, row);
    const int end = documents == nullptr ? NO_END : static_cast<int>(documents[2 * (past + row) + 1]);
    return {sequence, row - sequence.first, before, end - 1 - position};
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline float silu(float x) { return x * sigmoid(x); }

__device__ inline float slope_of_silu(float x) {
    const float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// ---- The short convolution. A thread has four neighbouring channels. ----

// What the convolution reads.
struct Inputs {
    const T *projected, *w; // (rows, P), (M, taps)
    const float* left; // what earlier rows have left, (B, S), or null
};

// The inputs of the row at `at` of its sequence. Before the first row are those that earlier rows have left.
__device__ inline Four input_at(const Inputs& inputs, const Sequence& sequence, int at, int column, int some,
                                const Linear& size) {
    if (at >= 0) {
        return read(inputs.projected + static_cast<long long>(sequence.first + at) * size.projected() + column, some);
    }
    const long long nth = size.taps - 1 + at;
    return read(inputs.left + sequence.index * size.carried() + nth * size.mixed() + column, some);
}

// Adds to sums the products of four channels and their weights of a tap.
__device__ inline void add_tap(Four& sums, const Four& x, const T* w, int column, int some, int tap, int taps) {
    for (int i = 0; i < 4; ++i) {
        if (i < some) {
            sums.of[i] = fmaf(get(w[static_cast<long long>(column + i) * taps + tap]), x.of[i], sums.of[i]);
        }
    }
}

// The weighted sums of a row's inputs and of those before it.
__device__ inline Four convolve(const Inputs& inputs, const Row& row, int column, int some, const Linear& size) {
    Four sums = {};
    for (int back = min(size.taps - 1, row.before); back >= 0; --back) {
        const Four x = input_at(inputs, row.sequence, row.at - back, column, some, size);
        add_tap(sums, x, inputs.w, column, some, size.taps - 1 - back, size.taps);
    }
    return sums;
}

// The gradients of these sums, from those of the outputs.
__device__ inline Four sum_gradients(const T* dy, const Inputs& inputs, const Row& row, int column, int some,
                                     const Linear& size) {
    const Four sums = convolve(inputs, row, column, some, size);
    Four d = read(dy + static_cast<long long>(row.sequence.first + row.at) * size.mixed() + column, some);
    for (int i = 0; i < 4; ++i) {
        d.of[i] *= slope_of_silu(sums.of[i]);
    }
    return d;
}

// y = silu(sum of w[c, i] x[row - taps + 1 + i, c]) by channel, over rows of one document. channels: M.
// launch: grid (rows, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void short_convolution(T* y, const T* projected, const T* w, const float* left,
                                             const int* starts, const unsigned* documents, const int* pasts,
                                             int channels, Linear size) {
    const int column = my_column(), some = channels - column;
    if (some <= 0) {
        return;
    }
    const Row row = row_of(starts, documents, pasts, size, blockIdx.x);
    Four values = convolve({projected, w, left}, row, column, some, size);
    for (int i = 0; i < 4; ++i) {
        values.of[i] = silu(values.of[i]);
    }
    write(y + static_cast<long long>(blockIdx.x) * channels + column, values, some);
}

// The inputs of the last taps - 1 rows of each sequence, for later rows; zeros where there is none. behind: (B, S).
// launch: grid (sequences (taps - 1), ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void leave_inputs(float* behind, const T* projected, const float* left, const int* starts,
                                        const int* pasts, int channels, Linear size) {
    const int column = my_column(), some = channels - column;
    if (some <= 0) {
        return;
    }
    const int index = blockIdx.x / (size.taps - 1), nth = blockIdx.x % (size.taps - 1);
    const Sequence sequence = sequence_at(starts, size.sequences, size.rows, index);
    const int at = sequence.count - (size.taps - 1) + nth;
    const bool is_there = at >= 0 || (left != nullptr && past_of(pasts, size, index) > 0);
    const Inputs inputs = {projected, nullptr, left};
    const Four values = is_there ? input_at(inputs, sequence, at, column, some, size) : Four{};
    write(behind + index * size.carried() + static_cast<long long>(nth) * channels + column, values, some);
}

// The gradients of the inputs: the first M columns of dprojected. dbehind: the gradients of the sums on the first rows
// behind, (B, S), or null.
// launch: grid (rows, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void short_convolution_backward(T* dprojected, const T* dy, const T* projected, const T* w,
                                                      const float* left, const float* dbehind, const int* starts,
                                                      const unsigned* documents, const int* pasts, int channels,
                                                      Linear size) {
    const int column = my_column(), some = channels - column;
    if (some <= 0) {
        return;
    }
    const Row row = row_of(starts, documents, pasts, size, blockIdx.x);
    const Inputs inputs = {projected, w, left};
    Four dx = {};
    for (int ahead = 0; ahead < size.taps && ahead <= row.behind; ++ahead) {
        const int outside = row.at + ahead - row.sequence.count;
        Four d;
        if (outside < 0) {
            const Row next = {row.sequence, row.at + ahead, row.before + ahead, row.behind - ahead};
            d = sum_gradients(dy, inputs, next, column, some, size);
        } else if (dbehind != nullptr) {
            const long long first = row.sequence.index * size.carried();
            d = read(dbehind + first + static_cast<long long>(outside) * channels + column, some);
        } else {
            break;
        }
        add_tap(dx, d, w, column, some, size.taps - 1 - ahead, size.taps);
    }
    write(dprojected + static_cast<long long>(blockIdx.x) * size.projected() + column, dx, some);
}

// The gradients of the sums on the first taps - 1 rows of each sequence, for earlier rows; zeros where there is none.
// launch: grid (sequences (taps - 1), ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void leave_gradients(float* dbefore, const T* dy, const T* projected, const T* w,
                                           const float* left, const float* dbehind, const int* starts,
                                           const unsigned* documents, const int* pasts, int channels, Linear size) {
    const int column = my_column(), some = channels - column;
    if (some <= 0) {
        return;
    }
    const int index = blockIdx.x / (size.taps - 1), nth = blockIdx.x % (size.taps - 1);
    const Sequence sequence = sequence_at(starts, size.sequences, size.rows, index);
    const int outside = nth - sequence.count;
    Four d = {};
    if (outside < 0) {
        const Row row = row_of(starts, documents, pasts, size, sequence.first + nth);
        d = sum_gradients(dy, {projected, w, left}, row, column, some, size);
    } else if (dbehind != nullptr) {
        d = read(dbehind + index * size.carried() + static_cast<long long>(outside) * channels + column, some);
    }
    write(dbefore + index * size.carried() + static_cast<long long>(nth) * channels + column, d, some);
}

// Partial sums of dw over `chunk` rows. parts: (ceil(rows / chunk), M, taps).
// launch: grid (ceil(rows / chunk), ceil(channels / 1024), taps), block (threads(channels))
extern "C" __global__ void short_convolution_parts(float* parts, const T* dy, const T* projected, const T* w,
                                                   const float* left, const int* starts, const unsigned* documents,
                                                   const int* pasts, int chunk, int channels, Linear size) {
    const int column = my_column(), some = channels - column;
    if (some <= 0) {
        return;
    }
    const int tap = blockIdx.z, back = size.taps - 1 - tap;
    const Inputs inputs = {projected, w, left};
    const int first = blockIdx.x * chunk, end = min(first + chunk, size.rows);
    Four sums = {};
    for (int index = first; index < end; ++index) {
        const Row row = row_of(starts, documents, pasts, size, index);
        if (back <= row.before) {
            const Four d = sum_gradients(dy, inputs, row, column, some, size);
            const Four x = input_at(inputs, row.sequence, row.at - back, column, some, size);
            for (int i = 0; i < 4; ++i) {
                sums.of[i] = fmaf(d.of[i], x.of[i], sums.of[i]);
            }
        }
    }
    parts += (static_cast<long long>(blockIdx.x) * channels + column) * size.taps + tap;
    for (int i = 0; i < 4; ++i) {
        if (i < some) {
            parts[i * size.taps] = sums.of[i];
        }
    }
}

// ---- The norm of the output by head, with its gates. A warp takes a head of a row. ----

constexpr int HEADS_A_BLOCK = 8;

// 1 / the root of the mean square of a head's channels.
__device__ inline float rstd_of(const T* x, int channels, float epsilon) {
    float squares = 0.0f;
    for (int column = 4 * (threadIdx.x % WARP); column < channels; column += 4 * WARP) {
        const Four value = read(x + column, channels - column);
        for (int i = 0; i < 4; ++i) {
            squares = fmaf(value.of[i], value.of[i], squares);
        }
    }
    return 1.0f / sqrtf(warp_sum(squares) / channels + epsilon);
}

// y = gamma x rstd silu(z). x and y: (rows, H D_v).
// launch: grid (ceil(rows value_heads / 8)), block (256)
extern "C" __global__ void gated_norm(T* y, const T* x, const T* projected, const T* gamma, int rows, float epsilon,
                                      Linear size) {
    const long long index = static_cast<long long>(blockIdx.x) * HEADS_A_BLOCK + threadIdx.x / WARP;
    const long long row = index / size.value_heads;
    if (row >= rows) {
        return;
    }
    const int head = index % size.value_heads, channels = size.value_size;
    x += index * channels;
    y += index * channels;
    const T* const z = projected + row * size.projected() + size.remembered() + head * channels;
    const float rstd = rstd_of(x, channels, epsilon);
    for (int column = 4 * (threadIdx.x % WARP); column < channels; column += 4 * WARP) {
        const int some = channels - column;
        const Four scale = read(gamma + column, some), gate = read(z + column, some);
        Four value = read(x + column, some);
        for (int i = 0; i < 4; ++i) {
            value.of[i] = value.of[i] * rstd * scale.of[i] * silu(gate.of[i]);
        }
        write(y + column, value, some);
    }
}

// dx = rstd (g - n mean(g n)), with n = x rstd and g = dy silu(z) gamma; and dz, the last columns of dprojected.
// launch: grid (ceil(rows value_heads / 8)), block (256)
extern "C" __global__ void gated_norm_backward(T* dx, T* dprojected, const T* dy, const T* x, const T* projected,
                                               const T* gamma, int rows, float epsilon, Linear size) {
    const long long index = static_cast<long long>(blockIdx.x) * HEADS_A_BLOCK + threadIdx.x / WARP;
    const long long row = index / size.value_heads;
    if (row >= rows) {
        return;
    }
    const int head = index % size.value_heads, channels = size.value_size;
    x += index * channels;
    dx += index * channels;
    dy += index * channels;
    const long long gates = row * size.projected() + size.remembered() + head * channels;
    const float rstd = rstd_of(x, channels, epsilon);
    float sum = 0.0f;
    for (int column = 4 * (threadIdx.x % WARP); column < channels; column += 4 * WARP) {
        const int some = channels - column;
        const Four scale = read(gamma + column, some), gate = read(projected + gates + column, some);
        const Four d = read(dy + column, some), value = read(x + column, some);
        Four dz;
        for (int i = 0; i < 4; ++i) {
            const float normed = value.of[i] * rstd;
            sum = fmaf(d.of[i] * silu(gate.of[i]) * scale.of[i], normed, sum);
            dz.of[i] = d.of[i] * (normed * scale.of[i]) * slope_of_silu(gate.of[i]);
        }
        write(dprojected + gates + column, dz, some);
    }
    const float mean = warp_sum(sum) / channels;
    for (int column = 4 * (threadIdx.x % WARP); column < channels; column += 4 * WARP) {
        const int some = channels - column;
        const Four scale = read(gamma + column, some), gate = read(projected + gates + column, some);
        const Four d = read(dy + column, some), value = read(x + column, some);
        Four slope;
        for (int i = 0; i < 4; ++i) {
            const float g = d.of[i] * silu(gate.of[i]) * scale.of[i];
            slope.of[i] = rstd * (g - value.of[i] * rstd * mean);
        }
        write(dx + column, slope, some);
    }
}

// Partial sums of dgamma over the heads of `chunk` rows. parts: (ceil(rows / chunk), D_v).
// launch: grid (ceil(rows / chunk)), block (256)
extern "C" __global__ void gated_norm_parts(float* parts, const T* dy, const T* x, const T* projected, int rows,
                                            int chunk, float epsilon, Linear size) {
    alignas(16) __shared__ float sums[HEADS_A_BLOCK][4 * WARP];
    const int channels = size.value_size, heads = size.value_heads;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const long long from = static_cast<long long>(blockIdx.x) * chunk;
    const int own_rows = static_cast<int>(min(static_cast<long long>(chunk), rows - from));
    parts += static_cast<long long>(blockIdx.x) * channels;
    for (int first = 0; first < channels; first += 4 * WARP) {
        const int column = first + 4 * lane, some = channels - column;
        Four sum = {};
        for (int index = warp; index < own_rows * heads; index += HEADS_A_BLOCK) {
            const long long row = from + index / heads;
            const int head = index % heads;
            const long long at = (row * heads + head) * channels;
            const float rstd = rstd_of(x + at, channels, epsilon);
            const Four d = read(dy + at + column, some), value = read(x + at + column, some);
            const Four gate = read(projected + row * size.projected() + size.remembered() + head * channels + column,
                                   some);
            for (int i = 0; i < 4; ++i) {
                sum.of[i] = fmaf(d.of[i] * silu(gate.of[i]), value.of[i] * rstd, sum.of[i]);
            }
        }
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
