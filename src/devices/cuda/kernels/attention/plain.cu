// Attention without tensor cores.

// ---- The plain way: a block of 16 × 16 threads, each with 4 × 4 of a tile of 64 × 64. ----

constexpr int SIDE = 64;         // queries or keys of a tile, and channels of a piece of a head
constexpr int MOST = 256;        // channels of a block's results: those of a wider head are split over PARTS blocks
constexpr int PIECES = MOST / SIDE;
constexpr int DEPTH = 32;        // channels that are multiplied at a time
constexpr int PITCH = SIDE + 4;  // from one row in shared memory to the next: four stay together
constexpr int PLAIN_THREADS = 256;

struct PlainShared {
    Packed<float> staged[2 * DEPTH * PITCH / 4];
    Packed<float> mixing[SIDE * PITCH / 4];
    unsigned char kept[SIDE * SIDE / 4];
};

using Square = float[4][4];

// Σ over channels of a b, for a thread's four rows of a and four of b.
__device__ inline void plain_products(Square& sum, const Rows& a, const Rows& b, PlainShared& shared) {
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    float* const staged = shared.staged[0].of;
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
            sum[i][j] = 0.0f;
        }
    }
    for (int first = 0; first < a.channels; first += DEPTH) {
        __syncthreads(); // the channels before have been read
#pragma unroll 2 // more would take registers
        for (int index = threadIdx.x; index < SIDE * DEPTH; index += PLAIN_THREADS) {
            // A warp reads eight channels of four rows: whole sectors, and no bank conflict when it writes them.
            const int channel = index % 8 + index / (8 * SIDE) * 8, of = index / 8 % SIDE;
            const bool is_channel = first + channel < a.channels;
            const bool has_a = is_channel && of < a.count, has_b = is_channel && of < b.count;
            float* const to = staged + channel * PITCH + of;
            to[0] = has_a ? get(a.at[of * a.stride + first + channel]) : 0.0f;
            to[DEPTH * PITCH] = has_b ? get(b.at[of * b.stride + first + channel]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int channel = 0; channel < DEPTH; ++channel) {
            const Packed<float> x = shared.staged[channel * (PITCH / 4) + row];
            const Packed<float> y = shared.staged[(DEPTH + channel) * (PITCH / 4) + column];
            for (int i = 0; i < 4; ++i) {
                for (int j = 0; j < 4; ++j) {
                    sum[i][j] += x.of[i] * y.of[j];
                }
            }
        }
    }
}

// Rows with the channels of one part of a head.
template <int PARTS>
__device__ inline Rows part_of(Rows rows, int first) {
    if (PARTS > 1) {
        rows.at += first;
        rows.channels = min(rows.channels - first, MOST);
    }
    return rows;
}

// sum += p x, piece by piece of the channels: p's columns are x's rows.
__device__ inline void plain_mix(Square (&sum)[PIECES], const Square& p, const Rows& x, PlainShared& shared) {
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    __syncthreads(); // the p before has been read
    for (int j = 0; j < 4; ++j) {
        shared.mixing[(4 * column + j) * (PITCH / 4) + row] = {p[0][j], p[1][j], p[2][j], p[3][j]};
    }
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (piece * SIDE >= x.channels) {
            continue; // no break: the sums must stay in registers
        }
        __syncthreads();
#pragma unroll 2
        for (int index = threadIdx.x; index < SIDE * SIDE; index += PLAIN_THREADS) {
            const int of = index / SIDE, channel = piece * SIDE + index % SIDE;
            const bool is = of < x.count && channel < x.channels;
            shared.staged[0].of[of * PITCH + index % SIDE] = is ? get(x.at[of * x.stride + channel]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int of = 0; of < SIDE; ++of) {
            const Packed<float> a = shared.mixing[of * (PITCH / 4) + row];
            const Packed<float> b = shared.staged[of * (PITCH / 4) + column];
            for (int i = 0; i < 4; ++i) {
                for (int j = 0; j < 4; ++j) {
                    sum[piece][i][j] += a.of[i] * b.of[j];
                }
            }
        }
    }
}

// Writes (or adds) the sums of one of a thread's rows to the channels of a head.
template <class E>
__device__ inline void plain_give(E* to, const Square (&sum)[PIECES], int i, float by, int channels,
                                  bool add) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        for (int j = 0; j < 4; ++j) {
            const int channel = piece * SIDE + threadIdx.x % 16 * 4 + j;
            if (channel < channels) {
                set(to[channel], sum[piece][i][j] * by + (add ? get(to[channel]) : 0.0f));
            }
        }
    }
}

// y and the log-sum-exp of the scores. `kv`: keys and values in a tensor of their own; null: beside the queries.
template <int PARTS>
__device__ inline void plain_forward(T* y, float* lse, const T* qkv, const T* kv, const int* starts,
                                     const unsigned* documents, const Attention& size) {
    PlainShared& shared = shared_memory<PlainShared>();
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    const Head head(size, starts, documents, kv != nullptr, blockIdx.x / PARTS);
    const int first = blockIdx.x % PARTS * MOST; // channel of its part of the head
    const T* const keys_at = kv != nullptr ? kv : qkv;
    // The longest rows come first.
    const Span queries = head.tile(size.past, gridDim.y - 1 - blockIdx.y, SIDE);
    if (queries.count() <= 0) {
        return; // behind the end of a shorter sequence
    }
    const Sight sight = head.sight(queries);
    float most[4], total[4];
    Square mixed[PIECES] = {};
    for (int i = 0; i < 4; ++i) {
        most[i] = -infinity();
        total[i] = 0.0f;
    }
    for (int from = sight.first.from / SIDE * SIDE; from < sight.last.to; from += SIDE) {
        const Span keys = {from, min(from + SIDE, sight.last.to)};
        head.draw(shared.kept, queries.from, keys.from, SIDE, SIDE);
        Square p;
        plain_products(p, head.queries(qkv, queries), head.keys(keys_at, 0, keys), shared);
        for (int i = 0; i < 4; ++i) {
            const Span seen = head.seen(min(queries.from + row + i, queries.to - 1));
            float largest = most[i];
            for (int j = 0; j < 4; ++j) {
                p[i][j] = seen.has(keys.from + column + j) ? size.scale * p[i][j] : -infinity();
                largest = fmaxf(largest, p[i][j]);
            }
            for (int step = 8; step > 0; step /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, step));
            }
            // A query may see no key of the first tiles.
            const float base = largest == -infinity() ? 0.0f : largest;
            const float shrink = expf(most[i] - base);
            float sum = 0.0f;
            for (int j = 0; j < 4; ++j) {
                p[i][j] = expf(p[i][j] - base);
                sum += p[i][j];
            }
            for (int step = 8; step > 0; step /= 2) {
                sum += __shfl_xor_sync(FULL_MASK, sum, step);
            }
            most[i] = largest;
            total[i] = total[i] * shrink + sum;
            for (int piece = 0; piece < PIECES; ++piece) {
                for (int j = 0; j < 4; ++j) {
                    mixed[piece][i][j] *= shrink;
                }
            }
            if (size.dropout.threshold != 0) {
                for (int j = 0; j < 4; ++j) {
                    p[i][j] *= head.factor(shared.kept, row + i, column + j, SIDE);
                }
            }
        }
        plain_mix(mixed, p, part_of<PARTS>(head.keys(keys_at, 1, keys), first), shared);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int query = queries.from + row + i;
        if (query >= queries.to) {
            continue;
        }
        plain_give(y + head.at(query) + first, mixed, i, 1.0f / total[i], size.head_size - first, false);
        if (column == 0 && first == 0) {
            lse[head.statistic(query)] = most[i] + logf(total[i]);
        }
    }
}
// dk and dv, summed in order over the query heads that share the key head. They are written to `dkv` (or added to it),
// or, where it is null, beside the gradients of the queries. With several `shares`, blocks split these query heads, and
// `dkv` has the gradients of each share, one share after another.
template <int PARTS>
__device__ inline void plain_backward_keys(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                           const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                           const Attention& size, int accumulate, int shares) {
    PlainShared& shared = shared_memory<PlainShared>();
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    const int group = size.heads / size.kv_heads / shares;
    Head head(size, starts, documents, kv != nullptr, blockIdx.x / PARTS * group);
    const int first = blockIdx.x % PARTS * MOST;
    const T* const keys_at = kv != nullptr ? kv : qkv;
    const Span keys = head.tile(size.first_kept, blockIdx.y, SIDE);
    if (keys.count() <= 0) {
        return;
    }
    const Span seeing = head.seeing(keys);
    const Rows k = head.keys(keys_at, 0, keys), v = head.keys(keys_at, 1, keys);
    Square dk[PIECES] = {}, dv[PIECES] = {};
    for (int of = 0; of < group; ++of, ++head.head) {
        for (int from = seeing.from - (seeing.from - size.past) % SIDE; from < seeing.to; from += SIDE) {
            const Span queries = {from, min(from + SIDE, head.end())};
            const Rows q = head.queries(qkv, queries), dy_rows = head.columns(dy, queries);
            head.draw(shared.kept, queries.from, keys.from, SIDE, SIDE);
            Square p, ds;
            plain_products(p, k, q, shared);
            plain_products(ds, v, dy_rows, shared);
            for (int j = 0; j < 4; ++j) {
                const int query = min(queries.from + column + j, queries.to - 1);
                const Span seen = queries.from + column + j < queries.to ? head.seen(query) : Span{};
                const float of_lse = lse[head.statistic(query)], of_delta = delta[head.statistic(query)];
                for (int i = 0; i < 4; ++i) {
                    const bool is_seen = seen.has(keys.from + row + i);
                    const float probability = is_seen ? expf(size.scale * p[i][j] - of_lse) : 0.0f;
                    const float factor = size.dropout.threshold == 0
                                             ? 1.0f
                                             : head.factor(shared.kept, column + j, row + i, SIDE);
                    p[i][j] = probability * factor;
                    ds[i][j] = probability * (ds[i][j] * factor - of_delta);
                }
            }
            plain_mix(dv, p, part_of<PARTS>(dy_rows, first), shared);
            plain_mix(dk, ds, part_of<PARTS>(q, first), shared);
        }
    }
    head.head -= group;
    if (dkv != nullptr) {
        head.is_apart = true;
        dkv += block_again() / PARTS % shares * head.all_keys();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int key = keys.from + row + i;
        if (key >= keys.to) {
            continue;
        }
        const long long to_k = head.at_key(key, 0) + first, to_v = head.at_key(key, 1) + first;
        const int channels = size.head_size - first;
        if (dkv != nullptr) {
            plain_give(dkv + to_k, dk, i, size.scale, channels, accumulate != 0);
            plain_give(dkv + to_v, dv, i, 1.0f, channels, accumulate != 0);
        } else {
            plain_give(dqkv + to_k, dk, i, size.scale, channels, false);
            plain_give(dqkv + to_v, dv, i, 1.0f, channels, false);
        }
    }
}
// dq.
template <int PARTS>
__device__ inline void plain_backward_queries(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                              const T* kv, const int* starts, const unsigned* documents,
                                              const Attention& size) {
    PlainShared& shared = shared_memory<PlainShared>();
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    const Head head(size, starts, documents, kv != nullptr, blockIdx.x / PARTS);
    const int first = blockIdx.x % PARTS * MOST; // channel of its part of the head
    const T* const keys_at = kv != nullptr ? kv : qkv;
    const Span queries = head.tile(size.past, gridDim.y - 1 - blockIdx.y, SIDE);
    if (queries.count() <= 0) {
        return; // behind the end of a shorter sequence
    }
    const Sight sight = head.sight(queries);
    Square dq[PIECES] = {};
    for (int from = sight.first.from / SIDE * SIDE; from < sight.last.to; from += SIDE) {
        const Span keys = {from, min(from + SIDE, sight.last.to)};
        const Rows k = head.keys(keys_at, 0, keys);
        head.draw(shared.kept, queries.from, keys.from, SIDE, SIDE);
        Square p, ds;
        plain_products(p, head.queries(qkv, queries), k, shared);
        plain_products(ds, head.columns(dy, queries), head.keys(keys_at, 1, keys), shared);
        for (int i = 0; i < 4; ++i) {
            const int query = min(queries.from + row + i, queries.to - 1);
            const Span seen = head.seen(query);
            const float of_lse = lse[head.statistic(query)], of_delta = delta[head.statistic(query)];
            for (int j = 0; j < 4; ++j) {
                const bool is_seen = seen.has(keys.from + column + j);
                const float probability = is_seen ? expf(size.scale * p[i][j] - of_lse) : 0.0f;
                if (size.dropout.threshold != 0) {
                    ds[i][j] *= head.factor(shared.kept, row + i, column + j, SIDE);
                }
                ds[i][j] = probability * (ds[i][j] - of_delta);
            }
        }
        plain_mix(dq, ds, part_of<PARTS>(k, first), shared);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int query = queries.from + row + i;
        if (query < queries.to) {
            plain_give(dqkv + head.at_query(query) + first, dq, i, size.scale, size.head_size - first, false);
        }
    }
}
