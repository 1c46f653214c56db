
// ---- The delta rule, position by position, forward and backward. ----
//
// A block has some channels of a head of values of a sequence, and the rows of the state that belong to them. A channel's
// row of the state lies in the registers of LANES lanes of a warp. So the order of every sum is the same wherever a
// sequence is cut.
//
// The backward goes over a sequence in segments of `count` positions, last segment first, so that what it keeps does not
// grow with the length, but for a state a segment. Tensors of a segment have the layout (B, count, H, any).

// Added to the square of the length of a query or key.
constexpr float EPSILON = 1e-6f;

// Each lane's keys are groups of four neighbours. KEYS: of a lane. POSITIONS: of which queries and keys are in shared
// memory at once.
template <int L, int K, int P>
struct Sizes {
    static constexpr int LANES = L, KEYS = K, POSITIONS = P, WIDTH = L * K, CHANNELS = 256 / L;
};

using Small = Sizes<8, 16, 16>; // D_k up to 128
using Large = Sizes<32, 32, 4>; // D_k up to 1024

template <class S>
struct alignas(16) Staged {
    float q[S::POSITIONS][S::WIDTH], k[S::POSITIONS][S::WIDTH];
    float inputs[S::POSITIONS][S::CHANNELS]; // values, or the gradients of outputs
    float outputs[S::POSITIONS][S::CHANNELS];
    float alpha[S::POSITIONS], beta[S::POSITIONS];
};

// What all positions read.
struct Rule {
    const T *x, *projected, *log, *bias; // (rows, M), (rows, P), (H), (H)
    const int* starts;
    const unsigned* documents;
    const int* pasts;
};

// The factors of a position.
struct Factors {
    float alpha, beta, step, softplus, rate;
};

__device__ inline Factors factors_of(const Rule& rule, int row, int head, const Linear& size) {
    const T* const logits = rule.projected + static_cast<long long>(row) * size.projected() + size.mixed();
    const float step = get(logits[size.value_heads + head]) + get(rule.bias[head]);
    // As PyTorch, which is linear from here on.
    const float softplus = step > 20.0f ? step : log1pf(expf(step));
    const float rate = expf(get(rule.log[head]));
    return {expf(-rate * softplus), sigmoid(get(logits[head])), step, softplus, rate};
}

// alpha, or 0 at the first position of a document: no state passes on.
__device__ inline float decay_of(const Rule& rule, const Factors& factors, int row, const Linear& size) {
    return row_of(rule.starts, rule.documents, rule.pasts, size, row).before == 0 ? 0.0f : factors.alpha;
}

// 1 / the length of a query or key. All lanes of the warp get it.
__device__ inline float inverse_length(const T* x, int channels) {
    float squares = 0.0f;
    for (int column = 4 * (threadIdx.x % WARP); column < channels; column += 4 * WARP) {
        const Four value = read(x + column, channels - column);
        for (int i = 0; i < 4; ++i) {
            squares = fmaf(value.of[i], value.of[i], squares);
        }
    }
    return 1.0f / sqrtf(warp_sum(squares) + EPSILON);
}

// The first column of a head's queries. Its keys lie size.keys() behind them, and its values in value_column.
__device__ inline int query_column(int head, const Linear& size) {
    return head / (size.value_heads / size.key_heads) * size.key_size;
}

__device__ inline int value_column(int head, const Linear& size) { return 2 * size.keys() + head * size.value_size; }

// The factor of queries beside their lengths.
__device__ inline float query_scale(const Linear& size) { return 1.0f / sqrtf(static_cast<float>(size.key_size)); }

// Stages queries, keys and factors of `some` rows from `first` on.
template <class S>
__device__ inline void stage(Staged<S>& staged, const Rule& rule, int first, int some, int head, const Linear& size) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int index = warp; index < 2 * some; index += blockDim.x / WARP) {
        const int at = index / 2, is_key = index % 2;
        const T* const x = rule.x + static_cast<long long>(first + at) * size.mixed() + query_column(head, size) +
                           is_key * size.keys();
        const float factor = inverse_length(x, size.key_size) * (is_key ? 1.0f : query_scale(size));
        float* const to = is_key ? staged.k[at] : staged.q[at];
        for (int column = 4 * lane; column < S::WIDTH; column += 4 * WARP) {
            Four values = read(x + column, size.key_size - column); // 0 behind the last
            for (int i = 0; i < 4; ++i) {
                values.of[i] *= factor;
            }
            write(to + column, values, 4);
        }
    }
    for (int at = threadIdx.x; at < some; at += blockDim.x) {
        const Factors factors = factors_of(rule, first + at, head, size);
        staged.alpha[at] = decay_of(rule, factors, first + at, size);
        staged.beta[at] = factors.beta;
    }
}

// Stages columns of `some` rows: the block's channels of a head, which begin at `column` of a row of `width`.
template <class S>
__device__ inline void stage_channels(Staged<S>& staged, const T* from, int some, int width, int column, int left) {
    for (int index = threadIdx.x; index < some * S::CHANNELS; index += blockDim.x) {
        const int at = index / S::CHANNELS, channel = index % S::CHANNELS;
        const T* const x = from + static_cast<long long>(at) * width + column + channel;
        staged.inputs[at][channel] = channel < left ? get(*x) : 0.0f;
    }
}

// The place of this thread in its block.
template <class S>
struct Own {
    const int lane = threadIdx.x % S::LANES, channel = threadIdx.x / S::LANES;

    // The lane's keys of a group.
    __device__ int key(int group) const { return 4 * (lane + S::LANES * group); }

    __device__ Four read_keys(const float* row, int group) const { return read_as<true>(row + key(group), 4); }

    // The sum over the lanes of a channel; all get it.
    __device__ float sum(float x) const {
        for (int step = S::LANES / 2; step > 0; step /= 2) {
            x += __shfl_xor_sync(FULL_MASK, x, step);
        }
        return x;
    }
};

// A lane's part of a channel's row of a state.
template <class S>
struct State {
    Four of[S::KEYS / 4];

    __device__ void load(const Own<S>& own, const float* row, int keys) {
#pragma unroll
        for (int group = 0; group < S::KEYS / 4; ++group) {
            of[group] = row == nullptr ? Four{} : read(row + own.key(group), keys - own.key(group));
        }
    }

    __device__ void store(const Own<S>& own, float* row, int keys) const {
#pragma unroll
        for (int group = 0; group < S::KEYS / 4; ++group) {
            if (own.key(group) < keys) {
                write(row + own.key(group), of[group], keys - own.key(group));
            }
        }
    }

    // The product with a query or a key.
    __device__ float dot(const Own<S>& own, const float* with) const {
        float sum = 0.0f;
#pragma unroll
        for (int group = 0; group < S::KEYS / 4; ++group) {
            const Four other = own.read_keys(with, group);
            for (int i = 0; i < 4; ++i) {
                sum = fmaf(of[group].of[i], other.of[i], sum);
            }
        }
        return own.sum(sum);
    }

    // Becomes factor times itself, and share times a query or a key more.
    __device__ void move(const Own<S>& own, float factor, float share, const float* to) {
#pragma unroll
        for (int group = 0; group < S::KEYS / 4; ++group) {
            const Four other = own.read_keys(to, group);
            for (int i = 0; i < 4; ++i) {
                of[group].of[i] = fmaf(factor, of[group].of[i], share * other.of[i]);
            }
        }
    }
};

// The block's part of a tensor of states, (B, H, D_v, D_k), whose sequences lie `stride` apart; this channel's row.
__device__ inline long long state_row(long long stride, int channel, const Linear& size) {
    const long long row = static_cast<long long>(blockIdx.y) * size.value_size + channel;
    return blockIdx.z * stride + row * size.key_size;
}

// The positions of a segment that this block's sequence has.
__device__ inline int here(const Sequence& sequence, int from, int count) {
    return min(count, sequence.count - from);
}

// Where the outputs of a pass over a segment go. Each may be null.
struct Outputs {
    T* y; // (rows, H D_v)
    float* errors; // v - alpha S k. (B, count, H, D_v)
    float* kept; // the state before each `every`-th position. (n, B, H, D_v, D_k)
    float* behind; // the state behind the last row of a sequence
};

template <class S>
__device__ inline void write_channels(const Staged<S>& staged, const Outputs& to, const Sequence& sequence, int from,
                                      int count, int first, int some, int left, const Linear& size) {
    for (int index = threadIdx.x; index < some * S::CHANNELS; index += blockDim.x) {
        const int at = index / S::CHANNELS, channel = index % S::CHANNELS;
        const long long column = blockIdx.y * size.value_size + blockIdx.x * S::CHANNELS + channel;
        if (channel < left && to.y != nullptr) {
            const long long row = sequence.first + from + first + at;
            set(to.y[row * size.values() + column], staged.outputs[at][channel]);
        } else if (channel < left && to.errors != nullptr) {
            const long long row = static_cast<long long>(sequence.index) * count + first + at;
            to.errors[row * size.values() + column] = staged.outputs[at][channel];
        }
    }
}

template <class S>
__device__ inline void run_rule(const Outputs& to, const Rule& rule, const float* left, long long left_stride,
                                long long behind_stride, int from, int count, int every, const Linear& size) {
    __shared__ Staged<S> staged;
    const Own<S> own = {};
    const int head = blockIdx.y, first_channel = blockIdx.x * S::CHANNELS, channel = first_channel + own.channel;
    const Sequence sequence = sequence_at(rule.starts, size.sequences, size.rows, blockIdx.z);
    const int rows = here(sequence, from, count), keys = size.key_size, channels = size.value_size - first_channel;
    if (rows <= 0) {
        return;
    }
    const bool is_mine = channel < size.value_size;
    const bool has_left = left != nullptr && (from > 0 || past_of(rule.pasts, size, sequence.index) > 0);
    State<S> state;
    state.load(own, has_left && is_mine ? left + state_row(left_stride, channel, size) : nullptr, keys);
    for (int first = 0; first < rows; first += S::POSITIONS) {
        const int some = min(S::POSITIONS, rows - first), row = sequence.first + from + first;
        __syncthreads(); // the outputs before are written
        stage(staged, rule, row, some, head, size);
        const T* const values = rule.x + static_cast<long long>(row) * size.mixed();
        stage_channels(staged, values, some, size.mixed(), value_column(head, size) + first_channel, channels);
        __syncthreads();
        for (int at = 0; at < some; ++at) {
            if (to.kept != nullptr && is_mine && (first + at) % every == 0) {
                const long long nth = (first + at) / every * size.sequences;
                state.store(own, to.kept + nth * size.states() + state_row(size.states(), channel, size), keys);
            }
            const float alpha = staged.alpha[at];
            const float error = staged.inputs[at][own.channel] - alpha * state.dot(own, staged.k[at]);
            state.move(own, alpha, staged.beta[at] * error, staged.k[at]);
            const float output = to.y == nullptr ? error : state.dot(own, staged.q[at]);
            if (own.lane == 0) {
                staged.outputs[at][own.channel] = output;
            }
        }
        __syncthreads();
        write_channels(staged, to, sequence, from, count, first, some, channels, size);
    }
    if (to.behind != nullptr && is_mine) {
        state.store(own, to.behind + state_row(behind_stride, channel, size), keys);
    }
}

// The delta rule on the positions from .. from + count of each sequence: S = alpha S + delta k, with delta = beta (v -
// alpha S k), then y = S q. left: states in front, (H, D_v, D_k) of sequences that lie left_stride apart, or null.
// launch: grid (ceil(value_size / 32), value_heads, sequences), block (256)
extern "C" __global__ void __launch_bounds__(256, 2)
    delta_rule_128(T* y, float* errors, float* kept, float* behind, const float* left, const T* x, const T* projected,
                   const T* log, const T* bias, const int* starts, const unsigned* documents, const int* pasts,
                   long long left_stride, long long behind_stride, int from, int count, int every, Linear size) {
    const Rule rule = {x, projected, log, bias, starts, documents, pasts};
    run_rule<Small>({y, errors, kept, behind}, rule, left, left_stride, behind_stride, from, count, every, size);
}

// launch: grid (ceil(value_size / 8), value_heads, sequences), block (256)
extern "C" __global__ void __launch_bounds__(256, 2)
    delta_rule_1024(T* y, float* errors, float* kept, float* behind, const float* left, const T* x, const T* projected,
                    const T* log, const T* bias, const int* starts, const unsigned* documents, const int* pasts,
                    long long left_stride, long long behind_stride, int from, int count, int every, Linear size) {
    const Rule rule = {x, projected, log, bias, starts, documents, pasts};
    run_rule<Large>({y, errors, kept, behind}, rule, left, left_stride, behind_stride, from, count, every, size);
}

// Where the gradients of a segment go.
struct Slopes {
    float* slopes; // of delta: (B, count, H, D_v)
    float* kept; // the gradient of the state behind each piece of `every` positions. (n, B, H, D_v, D_k)
    float* carry; // that of the state in front of the segment: in, the state behind it. (B, H, D_v, D_k)
    float* dbefore; // that of the state in front of the sequence, or null
    T* dx; // of values: columns of (rows, M)
};

template <class S>
__device__ inline void run_rule_back(const Slopes& to, const T* dy, const Rule& rule, const float* dbehind,
                                     long long stride, int from, int count, int every, const Linear& size) {
    __shared__ Staged<S> staged;
    const Own<S> own = {};
    const int head = blockIdx.y, first_channel = blockIdx.x * S::CHANNELS, channel = first_channel + own.channel;
    const Sequence sequence = sequence_at(rule.starts, size.sequences, size.rows, blockIdx.z);
    const int rows = here(sequence, from, count), keys = size.key_size, channels = size.value_size - first_channel;
    if (rows <= 0) {
        return;
    }
    const bool is_mine = channel < size.value_size, is_last = from + rows == sequence.count;
    float* const carry = to.carry + state_row(size.states(), channel, size);
    const float* const outside = dbehind == nullptr ? nullptr : dbehind + state_row(stride, channel, size);
    State<S> state;
    state.load(own, !is_mine ? nullptr : is_last ? outside : carry, keys);
    for (int first = (rows - 1) / S::POSITIONS * S::POSITIONS; first >= 0; first -= S::POSITIONS) {
        const int some = min(S::POSITIONS, rows - first), row = sequence.first + from + first;
        __syncthreads(); // the outputs before are written
        stage(staged, rule, row, some, head, size);
        const T* const outputs = dy + static_cast<long long>(row) * size.values();
        stage_channels(staged, outputs, some, size.values(), head * size.value_size + first_channel, channels);
        __syncthreads();
        for (int at = some - 1; at >= 0; --at) {
            const int position = first + at;
            if (is_mine && (position + 1 == rows || (position + 1) % every == 0)) {
                const long long nth = position / every * size.sequences;
                state.store(own, to.kept + nth * size.states() + state_row(size.states(), channel, size), keys);
            }
            state.move(own, 1.0f, staged.inputs[at][own.channel], staged.q[at]);
            const float slope = state.dot(own, staged.k[at]), alpha = staged.alpha[at];
            state.move(own, alpha, -alpha * staged.beta[at] * slope, staged.k[at]);
            if (own.lane == 0) {
                staged.outputs[at][own.channel] = slope;
            }
        }
        __syncthreads();
        write_channels(staged, {nullptr, to.slopes, nullptr, nullptr}, sequence, from, count, first, some, channels,
                       size);
        for (int index = threadIdx.x; index < some * S::CHANNELS; index += blockDim.x) {
            const int at = index / S::CHANNELS, of_block = index % S::CHANNELS;
            if (of_block < channels) {
                const int column = value_column(head, size) + first_channel + of_block;
                const float dv = staged.beta[at] * staged.outputs[at][of_block];
                set(to.dx[static_cast<long long>(row + at) * size.mixed() + column], dv);
            }
        }
    }
    if (is_mine) {
        state.store(own, carry, keys);
        if (to.dbefore != nullptr && from == 0) {
            state.store(own, to.dbefore + state_row(stride, channel, size), keys);
        }
    }
}

// The backward of the delta rule on the positions from .. from + count of each sequence, from the last to the first:
// the gradients of delta, of the states and of values. dbehind: gradients of the states behind the last rows, or null.
// launch: grid (ceil(value_size / 32), value_heads, sequences), block (256)
extern "C" __global__ void __launch_bounds__(256, 2)
    delta_rule_back_128(float* slopes, float* kept, float* carry, float* dbefore, T* dx, const T* dy,
                        const float* dbehind, const T* x, const T* projected, const T* log, const T* bias,
                        const int* starts, const unsigned* documents, const int* pasts, long long stride, int from,
                        int count, int every, Linear size) {
    const Rule rule = {x, projected, log, bias, starts, documents, pasts};
    run_rule_back<Small>({slopes, kept, carry, dbefore, dx}, dy, rule, dbehind, stride, from, count, every, size);
}

// launch: grid (ceil(value_size / 8), value_heads, sequences), block (256)
extern "C" __global__ void __launch_bounds__(256, 2)
    delta_rule_back_1024(float* slopes, float* kept, float* carry, float* dbefore, T* dx, const T* dy,
                         const float* dbehind, const T* x, const T* projected, const T* log, const T* bias,
                         const int* starts, const unsigned* documents, const int* pasts, long long stride, int from,
                         int count, int every, Linear size) {
    const Rule rule = {x, projected, log, bias, starts, documents, pasts};
    run_rule_back<Large>({slopes, kept, carry, dbefore, dx}, dy, rule, dbehind, stride, from, count, every, size);
}
