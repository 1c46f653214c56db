// Attention on tensor cores: forward, and backward to keys and to queries.

#if ELEMENT != 32

constexpr float LOG2_E = 1.44269504f;

// Writes (or adds) one of a lane's two rows of sums to the channels of a head, from `first` on.
template <class E, int COLUMNS>
__device__ inline void give(E* to, const Sum (&sums)[COLUMNS], int half, float by, int first, int channels,
                            bool add) {
    const bool is_paired =
        sizeof(E) == 2 && channels % 2 == 0 && reinterpret_cast<unsigned long long>(to) % 4 == 0;
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
        const int channel = first + column * 8 + lane_column();
        const float low = sums[column].of[2 * half] * by, high = sums[column].of[2 * half + 1] * by;
        if (is_paired && channel < channels) {
            *reinterpret_cast<unsigned*>(to + channel) = pack(low, high);
        } else {
            if (channel < channels) {
                set(to[channel], low + (add ? get(to[channel]) : 0.0f));
            }
            if (channel + 1 < channels) {
                set(to[channel + 1], high + (add ? get(to[channel + 1]) : 0.0f));
            }
        }
    }
}

// The positions of a tile that this warp has, if each warp has 16 STRIPS.
template <int STRIPS>
__device__ inline Span of_warp(Span tile) {
    const int from = tile.from + static_cast<int>(threadIdx.x) / WARP * 16 * STRIPS;
    return {min(from, tile.to), min(from + 16 * STRIPS, tile.to)};
}

// The distance of a lane's `index`-th row from its first. A lane has two rows in each strip of 16.
__device__ constexpr int to_row(int index) { return index / 2 * 16 + index % 2 * NEXT_ROW; }

// The maximum, and the sum, over all lanes that hold the same row.
__device__ inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, OF_ROW[0]));
    return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, OF_ROW[1]));
}

__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(FULL_MASK, x, OF_ROW[0]);
    return x + __shfl_xor_sync(FULL_MASK, x, OF_ROW[1]);
}

template <int HEAD, int KEYS, int QUERIES>
struct ForwardShared {
    Tile<HEAD, QUERIES> queries;
    Tile<HEAD, KEYS> keys, values;
    unsigned char kept[QUERIES * KEYS / 4];
};

// Masks the scores of a lane's two queries: those of keys that they do not see become −∞. The keys begin at `from`.
template <int N>
__device__ inline void hide(Sum (&p)[N], const Head& head, int query, int last_query, int from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Span seen = head.seen(min(query + NEXT_ROW * half, last_query));
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            if (!seen.has(from + i / 2 * 8 + lane_column() + i % 2)) {
                p[i / 2].of[2 * half + i % 2] = -infinity();
            }
        }
    }
}

template <int N>
__device__ inline void shrink_sums(Sum (&sums)[N], const float (&by)[2]) {
#pragma unroll
    for (Sum& sum : sums) {
        for (int i = 0; i < 4; ++i) {
            sum.of[i] *= by[i / 2];
        }
    }
}

// The running maximum of the scores and the running sum of their powers, for a lane's two queries of a strip.
struct Softmax {
    float most[2] = {-infinity(), -infinity()}, total[2] = {};

    // Replaces scores by powers. `shrink` is the factor of earlier sums, below 1 where a larger score came.
    template <int N>
    __device__ void add(Sum (&p)[N], float (&shrink)[2], float scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = most[half];
#pragma unroll
            for (const Sum& sum : p) {
                largest = fmaxf(largest, fmaxf(sum.of[2 * half], sum.of[2 * half + 1]));
            }
            largest = row_max(largest);
            // A query may see no key of the first tiles.
            const float base = largest == -infinity() ? 0.0f : largest * scale;
            shrink[half] = power_of_two(most[half] * scale - base);
            most[half] = largest;
            total[half] *= shrink[half];
#pragma unroll
            for (Sum& sum : p) {
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    sum.of[i] = power_of_two(sum.of[i] * scale - base);
                    total[half] += sum.of[i];
                }
            }
        }
    }
};

// Applies dropout to the powers of a lane's two queries. `query` counts in the tile of the mask `kept`.
template <int N>
__device__ inline void drop(Sum (&p)[N], const Head& head, const unsigned char* kept, int query) {
    const Attention& size = head.size;
    if (size.dropout.threshold != 0) {
#pragma unroll
        for (int i = 0; i < 4 * N; ++i) {
            const int key = i / 4 * 8 + lane_column() + i % 2;
            p[i / 4].of[i % 4] *= head.factor(kept, query + i % 4 / 2 * NEXT_ROW, key, 8 * N);
        }
    }
}

// Writes the outputs of a lane's two queries, if they come before `end`, and their log-sum-exps.
template <int N>
__device__ inline void give_mixed(T* y, float* lse, const Head& head, const Sum (&mixed)[N], const Softmax& softmax,
                                  int first_query, int end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = first_query + NEXT_ROW * half;
        const float sum = row_sum(softmax.total[half]);
        if (query >= end) {
            continue;
        }
        give(y + head.at(query), mixed, half, 1.0f / sum, 0, head.size.head_size, false);
        if (lane_column() == 0) {
            lse[head.statistic(query)] = softmax.most[half] * head.size.scale + logf(sum);
        }
    }
}

// A warp has 16 STRIPS queries. HELD: registers hold them.
template <int HEAD, int KEYS, int WARPS, int STRIPS, bool HELD>
__device__ inline void forward(T* y, float* lse, const T* qkv, const T* kv, const int* starts,
                               const unsigned* documents, const Attention& size) {
    constexpr int THREADS = WARP * WARPS, QUERIES = 16 * STRIPS * WARPS;
    using Shared = ForwardShared<HEAD, KEYS, QUERIES>;
    Shared& shared = shared_memory<Shared>();
    const int row = lane_row();
    const Head head(size, starts, documents, kv != nullptr, blockIdx.x);
    const T* const keys_at = kv != nullptr ? kv : qkv;
    // The longest rows come first.
    const Span queries = head.tile(size.past, gridDim.y - 1 - blockIdx.y, QUERIES);
    if (queries.count() <= 0) {
        return; // past the end of a shorter sequence
    }
    const Span mine = of_warp<STRIPS>(queries);
    const Sight sight = head.sight(queries), sight_of_mine = head.sight(mine);
    const float scale = size.scale * LOG2_E; // powers of two are faster than those of e
    Softmax softmax[STRIPS];
    Sums<STRIPS, HEAD> mixed = {};
    const auto tile = [&](int from) { return Span{from, min(from + KEYS, sight.last.to)}; };
    const int first = sight.first.from / KEYS * KEYS;
    copy_rows<THREADS>(shared.queries, head.queries(qkv, queries));
    if (first < sight.last.to) {
        copy_rows<THREADS>(shared.keys, head.keys(keys_at, 0, tile(first)));
    }
    Strip<HEAD, HELD> q[STRIPS];
    if (HELD) {
        await_copies();
        __syncthreads();
    }
    take(q, shared.queries);
    for (int from = first; from < sight.last.to; from += KEYS) {
        const bool is_seen = sight_of_mine.touches({from, from + KEYS});
        // Values are copied while scores are computed, and the next keys while values are multiplied.
        await_copies();
        __syncthreads();
        copy_rows<THREADS>(shared.values, head.keys(keys_at, 1, tile(from)));
        head.draw(shared.kept, queries.from, from, QUERIES, KEYS);
        Sums<STRIPS, KEYS> p;
        if (is_seen) {
            products(p, q, shared.keys);
            const bool is_covered = sight_of_mine.covers({from, from + KEYS});
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                if (!is_covered) {
                    hide(p[strip], head, mine.from + 16 * strip + row, queries.to - 1, from);
                }
                float shrink[2];
                softmax[strip].add(p[strip], shrink, scale);
                shrink_sums(mixed[strip], shrink);
            }
        }
        await_copies();
        __syncthreads();
        if (from + KEYS < sight.last.to) {
            copy_rows<THREADS>(shared.keys, head.keys(keys_at, 0, tile(from + KEYS)));
        }
        if (is_seen) {
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                drop(p[strip], head, shared.kept, mine.from - queries.from + 16 * strip + row);
            }
            mix<HEAD>(mixed, p, shared.values);
        }
    }
    await_copies(); // copies that no tile has awaited, where the queries see no key
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
        give_mixed(y, lse, head, mixed[strip], softmax[strip], mine.from + 16 * strip + row, mine.to);
    }
}

// A tile of queries, with all that the pass of keys reads of it.
template <int HEAD, int QUERIES, int KEYS>
struct QueriesStage {
    Tile<HEAD, QUERIES> queries, dy;
    float lse[QUERIES], delta[QUERIES];
    Span seen[QUERIES];
    unsigned char kept[QUERIES * KEYS / 4];
};

template <int HEAD, int QUERIES, int KEYS, int STAGES>
struct BackwardKeysShared {
    Tile<HEAD, KEYS> keys, values;
    QueriesStage<HEAD, QUERIES, KEYS> stages[STAGES];
};

// A warp has 16 STRIPS keys. HELD: registers hold them and their values. A block writes COLUMNS channels of a head: if
// registers have no room for the sums of all, several blocks share a head. DROPS: with dropout, whose code takes
// registers, too.
template <int HEAD, int QUERIES, int WARPS, int STAGES, int COLUMNS, int STRIPS,
          bool HELD, bool DROPS>
__device__ inline void keys_pass(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                 const T* qkv, const T* kv, const int* starts,
                                 const unsigned* documents, const Attention& size, bool accumulate,
                                 int shares) {
    constexpr int KEYS = 16 * STRIPS * WARPS, THREADS = WARP * WARPS, PARTS = HEAD / COLUMNS;
    using Shared = BackwardKeysShared<HEAD, QUERIES, KEYS, STAGES>;
    Shared& shared = shared_memory<Shared>();
    const int row = lane_row(), column = lane_column();
    const int group = size.heads / size.kv_heads / shares, part = blockIdx.x % PARTS * COLUMNS;
    Head head(size, starts, documents, kv != nullptr, blockIdx.x / PARTS * group);
    const T* const keys_at = kv != nullptr ? kv : qkv;
    // The first keys are seen by the most queries.
    const Span keys = head.tile(size.first_kept, blockIdx.y, KEYS), mine = of_warp<STRIPS>(keys);
    if (keys.count() <= 0) {
        return;
    }
    const Span seeing = head.seeing(keys);
    const int first = seeing.from - (seeing.from - size.past) % QUERIES;
    const int tiles = max(0, (seeing.to - first + QUERIES - 1) / QUERIES), all = group * tiles;

    // Begins to copy the `index`-th tile of queries, of all heads of the group in order.
    const auto stage = [&](int index) {
        Head of = head;
        of.head += index / tiles;
        const Span queries = of.tile(first, index % tiles, QUERIES);
        auto& to = shared.stages[index % STAGES];
        copy_rows<THREADS>(to.queries, of.queries(qkv, queries));
        copy_rows<THREADS>(to.dy, of.columns(dy, queries));
        for (int i = threadIdx.x; i < QUERIES; i += THREADS) {
            const int query = queries.from + i;
            const long long at = of.statistic(min(query, queries.to - 1));
            copy<4>(to.lse + i, lse + at, query < queries.to);
            copy<4>(to.delta + i, delta + at, query < queries.to);
            const Span seen = query < queries.to ? of.seen(query) : Span{};
            to.seen[i] = seen;
        }
        if (DROPS) {
            of.draw(to.kept, queries.from, keys.from, QUERIES, KEYS);
        }
    };

    const float scale = size.scale * LOG2_E;
    Sums<STRIPS, COLUMNS> dk = {}, dv = {};
    copy_rows<THREADS>(shared.keys, head.keys(keys_at, 0, keys));
    copy_rows<THREADS>(shared.values, head.keys(keys_at, 1, keys));
    if (all > 0) {
        stage(0);
    }
    Strip<HEAD, HELD> k[STRIPS], v[STRIPS];
    if (HELD) {
        await_copies();
        __syncthreads();
    }
    take(k, shared.keys);
    take(v, shared.values);
    for (int index = 0; index < all; ++index) {
        await_copies();
        __syncthreads(); // this tile is copied, and the one before is no longer read
        if (STAGES > 1 && index + 1 < all) {
            stage(index + 1);
        }
        const auto& of = shared.stages[index % STAGES];
        const Span queries = head.tile(first, index % tiles, QUERIES);
        const Sight sight = {of.seen[0], of.seen[queries.count() - 1]};
        if (mine.count() > 0 && sight.touches(mine)) {
            // Turned: rows are keys, columns are queries.
            Sums<STRIPS, QUERIES> p, ds;
            products(p, k, of.queries);
            products(ds, v, of.dy);
            // The query and the key of a lane's element, by its index in the strip.
            const auto query_of = [&](int at) { return at / 4 * 8 + column + at % 2; };
            const auto key_of = [&](int strip, int at) { return mine.from + 16 * strip + row + at % 4 / 2 * NEXT_ROW; };
            if (queries.count() < QUERIES || !sight.covers(mine)) {
#pragma unroll
                for (int i = 0; i < STRIPS * QUERIES / 2; ++i) {
                    const int strip = i / (QUERIES / 2), at = i % (QUERIES / 2);
                    if (!of.seen[query_of(at)].has(key_of(strip, at))) {
                        p[strip][at / 4].of[at % 4] = -infinity();
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < STRIPS * QUERIES / 2; ++i) {
                const int strip = i / (QUERIES / 2), at = i % (QUERIES / 2);
                float& x = p[strip][at / 4].of[at % 4];
                x = power_of_two(x * scale - of.lse[query_of(at)] * LOG2_E);
            }
            if (!DROPS) {
#pragma unroll
                for (int i = 0; i < STRIPS * QUERIES / 2; ++i) {
                    const int strip = i / (QUERIES / 2), at = i % (QUERIES / 2);
                    float& d = ds[strip][at / 4].of[at % 4];
                    d = p[strip][at / 4].of[at % 4] * (d - of.delta[query_of(at)]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < STRIPS * QUERIES / 2; ++i) {
                    const int strip = i / (QUERIES / 2), at = i % (QUERIES / 2), query = query_of(at);
                    const float factor = head.factor(of.kept, query, key_of(strip, at) - keys.from, KEYS);
                    float &x = p[strip][at / 4].of[at % 4], &d = ds[strip][at / 4].of[at % 4];
                    d = x * (d * factor - of.delta[query]);
                    x *= factor;
                }
            }
            mix<COLUMNS>(dv, p, of.dy, part);
            mix<COLUMNS>(dk, ds, of.queries, part);
        }
        if (STAGES == 1 && index + 1 < all) {
            __syncthreads();
            stage(index + 1);
        }
    }
    await_copies(); // copies that no tile has awaited, where no query sees the keys
    if (dkv != nullptr) {
        head.is_apart = true;
        dkv += block_again() / PARTS % shares * head.all_keys();
    }
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; ++i) {
        const int strip = i / 2, half = i % 2, key = mine.from + row + to_row(i);
        if (key >= mine.to) {
            continue;
        }
        const long long to_k = head.at_key(key, 0), to_v = head.at_key(key, 1);
        if (dkv != nullptr) {
            give(dkv + to_k, dk[strip], half, size.scale, part, size.head_size, accumulate);
            give(dkv + to_v, dv[strip], half, 1.0f, part, size.head_size, accumulate);
        } else {
            give(dqkv + to_k, dk[strip], half, size.scale, part, size.head_size, false);
            give(dqkv + to_v, dv[strip], half, 1.0f, part, size.head_size, false);
        }
    }
}

template <int HEAD, int QUERIES, int WARPS, int STAGES, int COLUMNS, int STRIPS,
          bool HELD>
__device__ inline void backward_keys(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                     const T* qkv, const T* kv, const int* starts,
                                     const unsigned* documents, const Attention& size, bool accumulate,
                                     int shares) {
    if (size.dropout.threshold == 0) {
        keys_pass<HEAD, QUERIES, WARPS, STAGES, COLUMNS, STRIPS, HELD, false>(
            dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size, accumulate, shares);
    } else {
        keys_pass<HEAD, QUERIES, WARPS, STAGES, COLUMNS, STRIPS, HELD, true>(
            dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size, accumulate, shares);
    }
}

// A tile of keys, with all that the pass of queries reads of it.
template <int HEAD, int KEYS, int QUERIES>
struct KeysStage {
    Tile<HEAD, KEYS> keys, values;
    unsigned char kept[QUERIES * KEYS / 4];
};

template <int HEAD, int KEYS, int QUERIES, int STAGES>
struct BackwardQueriesShared {
    Tile<HEAD, QUERIES> queries, dy;
    KeysStage<HEAD, KEYS, QUERIES> stages[STAGES];
};

// A warp has 16 STRIPS queries. HELD: registers hold them and dy.
template <int HEAD, int KEYS, int WARPS, int STAGES, int STRIPS, bool HELD>
__device__ inline void backward_queries(T* dqkv, const T* dy, const float* lse, const float* delta,
                                        const T* qkv, const T* kv, const int* starts,
                                        const unsigned* documents, const Attention& size) {
    constexpr int QUERIES = 16 * STRIPS * WARPS, THREADS = WARP * WARPS;
    using Shared = BackwardQueriesShared<HEAD, KEYS, QUERIES, STAGES>;
    Shared& shared = shared_memory<Shared>();
    const int row = lane_row(), column = lane_column();
    const Head head(size, starts, documents, kv != nullptr, blockIdx.x);
    const T* const keys_at = kv != nullptr ? kv : qkv;
    const Span queries = head.tile(size.past, gridDim.y - 1 - blockIdx.y, QUERIES);
    if (queries.count() <= 0) {
        return;
    }
    const Span mine = of_warp<STRIPS>(queries);
    const Sight sight = head.sight(queries), sight_of_mine = head.sight(mine);
    const float scale = size.scale * LOG2_E;
    // The statistics of a lane's rows.
    float of_lse[2 * STRIPS], of_delta[2 * STRIPS];
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; ++i) {
        const int query = min(mine.from + row + to_row(i), queries.to - 1);
        of_lse[i] = lse[head.statistic(query)] * LOG2_E;
        of_delta[i] = delta[head.statistic(query)];
    }

    // Begins to copy a tile of keys.
    const auto stage = [&](int from) {
        const Span keys = {from, min(from + KEYS, sight.last.to)};
        auto& to = shared.stages[from / KEYS % STAGES];
        copy_rows<THREADS>(to.keys, head.keys(keys_at, 0, keys));
        copy_rows<THREADS>(to.values, head.keys(keys_at, 1, keys));
        head.draw(to.kept, queries.from, from, QUERIES, KEYS);
    };

    Sums<STRIPS, HEAD> dq = {};
    const int first = sight.first.from / KEYS * KEYS;
    copy_rows<THREADS>(shared.queries, head.queries(qkv, queries));
    copy_rows<THREADS>(shared.dy, head.columns(dy, queries));
    if (first < sight.last.to) {
        stage(first);
    }
    Strip<HEAD, HELD> q[STRIPS], d_out[STRIPS];
    if (HELD) {
        await_copies();
        __syncthreads();
    }
    take(q, shared.queries);
    take(d_out, shared.dy);
    for (int from = first; from < sight.last.to; from += KEYS) {
        await_copies();
        __syncthreads(); // this tile is copied, and the one before is no longer read
        if (STAGES > 1 && from + KEYS < sight.last.to) {
            stage(from + KEYS);
        }
        const auto& of = shared.stages[from / KEYS % STAGES];
        if (sight_of_mine.touches({from, from + KEYS})) {
            Sums<STRIPS, KEYS> p, ds;
            products(p, q, of.keys);
            products(ds, d_out, of.values);
            // The row and the key of a lane's element, by its index in the strip.
            const auto row_of = [&](int strip, int at) { return 2 * strip + at % 4 / 2; };
            const auto key_of = [&](int at) { return at / 4 * 8 + column + at % 2; };
            if (!sight_of_mine.covers({from, from + KEYS})) {
#pragma unroll
                for (int of_row = 0; of_row < 2 * STRIPS; ++of_row) {
                    const Span seen = head.seen(min(mine.from + row + to_row(of_row), queries.to - 1));
#pragma unroll
                    for (int i = 0; i < KEYS / 4; ++i) {
                        if (!seen.has(from + i / 2 * 8 + column + i % 2)) {
                            p[of_row / 2][i / 2].of[of_row % 2 * 2 + i % 2] = -infinity();
                        }
                    }
                }
            }
            if (size.dropout.threshold != 0) {
#pragma unroll
                for (int i = 0; i < STRIPS * KEYS / 2; ++i) {
                    const int strip = i / (KEYS / 2), at = i % (KEYS / 2);
                    const int query = mine.from - queries.from + row + to_row(row_of(strip, at));
                    ds[strip][at / 4].of[at % 4] *= head.factor(of.kept, query, key_of(at), KEYS);
                }
            }
#pragma unroll
            for (int i = 0; i < STRIPS * KEYS / 2; ++i) {
                const int strip = i / (KEYS / 2), at = i % (KEYS / 2), of_row = row_of(strip, at);
                float& d = ds[strip][at / 4].of[at % 4];
                d = power_of_two(p[strip][at / 4].of[at % 4] * scale - of_lse[of_row]) * (d - of_delta[of_row]);
            }
            mix<HEAD>(dq, ds, of.keys);
        }
        if (STAGES == 1 && from + KEYS < sight.last.to) {
            __syncthreads();
            stage(from + KEYS);
        }
    }
    await_copies(); // copies that no tile has awaited, where the queries see no key
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; ++i) {
        const int query = mine.from + row + to_row(i);
        if (query < mine.to) {
            give(dqkv + head.at_query(query), dq[i / 2], i % 2, size.scale, 0, size.head_size, false);
        }
    }
}

#endif
