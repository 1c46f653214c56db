// Scaled dot-product attention in tiles (Dao et al. 2022): no tokens × tokens memory.
//
// A block owns a tile of queries of one head (forward, dq) or a tile of keys (dk, dv) and walks the other
// side in order, so every sum has one owner and one order. dq has a pass of its own.
//
// Each of the three passes comes in two ways. From sm_80 on, and in half on sm_75, elements are multiplied by
// tensor cores: the kernels' names end in the head size that they pad to, of 32, 64, 128 and 256 the smallest
// that holds a head. Elsewhere, one plain way takes heads of all sizes, up to 256.

// ---- Which queries see which keys, and where all of them are. ----

// Positions from..to of a sequence.
struct Span {
    int from, to;

    __device__ int count() const { return to - from; }
    __device__ bool has(int position) const { return from <= position && position < to; }
};

// What the first and the last of some queries see. Both ends of what is seen grow with the query.
struct Sight {
    Span first, last;

    // Whether any of the queries may see any of the keys.
    __device__ bool touches(Span keys) const { return keys.from < last.to && first.from < keys.to; }
    // Whether all of them see all.
    __device__ bool covers(Span keys) const { return last.from <= keys.from && keys.to <= first.to; }
};

// Some rows of channels, `stride` elements apart.
struct Rows {
    const T* at;
    long long stride;
    int count, channels;
};

// One head of one sequence. Positions are those of the sequence: its queries begin behind `past`.
struct Head {
    const Attention& size;
    const unsigned* documents;
    bool is_apart; // whether keys and values are not beside their queries
    int sequence, head, kv_head;
    Sequence own; // Keys and values that are apart are those of one sequence, from its first position on.

    __device__ Head(const Attention& size, const int* starts, const unsigned* documents, bool is_apart, int head)
        : size(size), documents(documents), is_apart(is_apart), sequence(blockIdx.z), head(head),
          kv_head(head / (size.heads / size.kv_heads)),
          own(sequence_at(starts, size.sequences, size.rows, blockIdx.z)) {}

    __device__ const Sequence& rows() const { return own; }

    // The position behind the last.
    __device__ int end() const { return size.past + rows().count; }

    // The `index`-th tile of so many positions from `first` on.
    __device__ Span tile(int first, int index, int positions) const {
        const int from = first + index * positions;
        return {from, min(from + positions, end())};
    }

    __device__ long long row(int position) const {
        return static_cast<long long>(rows().first) + position - size.past;
    }

    // Where this head's columns of a query begin in a (R, H D) tensor.
    __device__ long long at(int position) const {
        return (row(position) * size.heads + head) * size.head_size;
    }

    // Where this head's query of a position begins.
    __device__ long long at_query(int position) const {
        return (row(position) * (size.heads + 2 * size.kv_heads) + head) * size.head_size;
    }

    // Heads from one position's keys to the next one's.
    __device__ int key_stride() const { return (is_apart ? 0 : size.heads) + 2 * size.kv_heads; }

    // Where this head's key (0) or value (1) of a position begins.
    __device__ long long at_key(int position, int which) const {
        const int before = is_apart ? 0 : size.heads;
        const long long place = rows().first + position;
        return (place * key_stride() + before + which * size.kv_heads + kv_head) * size.head_size;
    }

    // How many elements all keys and values have, where they are apart.
    __device__ long long all_keys() const {
        return static_cast<long long>(size.past + size.rows) * key_stride() * size.head_size;
    }

    // Index of a query among numbers that are laid out sequence by sequence, head by head.
    __device__ long long statistic(int position) const {
        const Sequence of = rows();
        return static_cast<long long>(of.first) * size.heads + head * of.count + position - size.past;
    }

    __device__ Rows queries(const T* qkv, Span span) const {
        const long long stride = static_cast<long long>(size.heads + 2 * size.kv_heads) * size.head_size;
        return {qkv + at_query(span.from), stride, span.count(), size.head_size};
    }

    // Keys (0) or values (1).
    __device__ Rows keys(const T* kv, int which, Span span) const {
        const long long stride = static_cast<long long>(key_stride()) * size.head_size;
        return {kv + at_key(span.from, which), stride, span.count(), size.head_size};
    }

    // This head's columns of a (R, H D) tensor.
    __device__ Rows columns(const T* x, Span span) const {
        const long long stride = static_cast<long long>(size.heads) * size.head_size;
        return {x + at(span.from), stride, span.count(), size.head_size};
    }

    __device__ Span document(int position) const {
        if (documents == nullptr) {
            return {0, end()};
        }
        const long long place = rows().first + position;
        return {static_cast<int>(documents[2 * place]), static_cast<int>(documents[2 * place + 1])};
    }

    // Keys that a query sees.
    __device__ Span seen(int query) const {
        Span span = document(query);
        span.to = min(span.to, size.causal ? query + 1 : end());
        span.from = size.window > 0 ? max(span.from, query + 1 - size.window) : span.from;
        return span;
    }

    __device__ Sight sight(Span queries) const {
        return queries.from < queries.to ? Sight{seen(queries.from), seen(queries.to - 1)} : Sight{};
    }

    // Queries that may see some of the keys.
    __device__ Span seeing(Span keys) const {
        const Span first = document(keys.from), last = document(keys.to - 1);
        Span span = {size.causal ? keys.from : first.from, last.to};
        if (size.window > 0 && size.window < span.to - keys.to) {
            span.to = keys.to - 1 + size.window;
        }
        return {max(span.from, size.past), min(span.to, end())};
    }

    // Draws dropout of a tile: `kept` has a byte for each query and four keys, a bit for each key.
    __device__ void draw(unsigned char* kept, int first_query, int first_key, int queries, int keys) const {
        if (size.dropout.threshold == 0) {
            return;
        }
        for (int index = threadIdx.x; index < queries * (keys / 4); index += blockDim.x) {
            const unsigned query = first_query - size.past + index / (keys / 4);
            const unsigned row = static_cast<unsigned>(head) << 20 | query;
            const int key = first_key + index % (keys / 4) * 4;
            const Four factors = dropout_factors(size.dropout, sequence, row, key);
            unsigned bits = 0;
            for (int i = 0; i < 4; ++i) {
                bits |= static_cast<unsigned>(factors.of[i] != 0.0f) << i;
            }
            kept[index] = static_cast<unsigned char>(bits);
        }
    }

    // The factor of one pair of a tile that has so many keys.
    __device__ float factor(const unsigned char* kept, int query, int key, int keys) const {
        return kept[query * (keys / 4) + key / 4] >> key % 4 & 1 ? size.dropout.scale : 0.0f;
    }
};

// Σ y dy of each query and head, laid out as log-sum-exps are. One warp each.
// launch: grid (ceil(rows heads / 8)), block (256)
extern "C" __global__ void __launch_bounds__(256)
    attention_delta(float* delta, const T* y, const T* dy, const int* starts, Attention size) {
    const int lane = threadIdx.x % WARP;
    const long long task = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    const long long row = task / size.heads, head = task % size.heads;
    if (row >= size.rows) {
        return;
    }
    float sum = 0.0f;
    for (int channel = lane; channel < size.head_size; channel += WARP) {
        const long long at = task * size.head_size + channel;
        sum += get(y[at]) * get(dy[at]);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        const Sequence of = sequence_of(starts, size.sequences, size.rows, row);
        delta[static_cast<long long>(of.first) * size.heads + head * of.count + row - of.first] = sum;
    }
}

// True where tensor cores multiply elements. The emulator knows both ways.
#if ELEMENT != 32 && (defined EMULATOR || __CUDA_ARCH__ >= 800 || (ELEMENT == 15 && __CUDA_ARCH__ == 750))
#define HAS_TENSOR_CORES
#endif

// True where warpgroups multiply by wgmma, which sm_90a alone has.
#if ELEMENT != 32 && (defined EMULATOR || defined __CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA
#endif

// blockIdx.x, read again: a number that is computed from it after a loop needs no register during the loop.
__device__ inline int block_again() {
#ifdef EMULATOR
    return blockIdx.x;
#else
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
#endif
}

template <class Shared>
__device__ inline Shared& shared_memory() {
    DYNAMIC_SHARED(Shared, shared);
    return *shared;
}

#if defined EMULATOR || !defined HAS_TENSOR_CORES

// ---- The plain way: a block of 16 × 16 threads, each with 4 × 4 of a tile of 64 × 64. ----

constexpr int SIDE = 64;         // queries or keys of a tile, and channels of a piece of a head
constexpr int PIECES = 256 / SIDE;
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
        __syncthreads(); // nobody reads what was staged before
#pragma unroll 2 // more would take registers
        for (int index = threadIdx.x; index < SIDE * DEPTH; index += PLAIN_THREADS) {
            // A warp takes eight channels of four rows: all that it reads in one piece, no bank twice.
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

// sum += p x, piece by piece of the channels: p's columns are x's rows.
__device__ inline void plain_mix(Square (&sum)[PIECES], const Square& p, const Rows& x, PlainShared& shared) {
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    __syncthreads(); // nobody reads what was mixed before
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

// Writes (or adds) one of a thread's rows of sums to a head's channels.
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

// y and the log-sum-exp of the scores. `kv`: keys and values, if they are not beside the queries.
// launch: grid (heads, ceil(longest / 64), sequences), block (256), shared 35840 bytes
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS, 2)
    attention(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
              Attention size) {
    PlainShared& shared = shared_memory<PlainShared>();
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    const Head head(size, starts, documents, kv != nullptr, blockIdx.x);
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
            // A query may see nothing of the first tiles.
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
        plain_mix(mixed, p, head.keys(keys_at, 1, keys), shared);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int query = queries.from + row + i;
        if (query >= queries.to) {
            continue;
        }
        plain_give(y + head.at(query), mixed, i, 1.0f / total[i], size.head_size, false);
        if (column == 0) {
            lse[head.statistic(query)] = most[i] + logf(total[i]);
        }
    }
}

// dk and dv, from the query heads that they serve, in order. They are written beside their queries' gradients or,
// where it is not null, to `dkv` (or added to it). `shares`: that many blocks split these query heads; `dkv` then
// has the gradients of each share, one share after the other.
// launch: grid (shares kv_heads, ceil((past + longest) / 64), sequences), block (256), shared 35840 bytes
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS)
    attention_backward_keys(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                            const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                            Attention size, int accumulate, int shares) {
    PlainShared& shared = shared_memory<PlainShared>();
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    const int group = size.heads / size.kv_heads / shares;
    Head head(size, starts, documents, kv != nullptr, blockIdx.x * group);
    const T* const keys_at = kv != nullptr ? kv : qkv;
    const Span keys = head.tile(0, blockIdx.y, SIDE);
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
            plain_mix(dv, p, dy_rows, shared);
            plain_mix(dk, ds, q, shared);
        }
    }
    head.head -= group;
    if (dkv != nullptr) {
        head.is_apart = true;
        dkv += block_again() % shares * head.all_keys();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int key = keys.from + row + i;
        if (key >= keys.to) {
            continue;
        }
        const long long to_k = head.at_key(key, 0), to_v = head.at_key(key, 1);
        if (dkv != nullptr) {
            plain_give(dkv + to_k, dk, i, size.scale, size.head_size, accumulate != 0);
            plain_give(dkv + to_v, dv, i, 1.0f, size.head_size, accumulate != 0);
        } else {
            plain_give(dqkv + to_k, dk, i, size.scale, size.head_size, false);
            plain_give(dqkv + to_v, dv, i, 1.0f, size.head_size, false);
        }
    }
}

// dq.
// launch: grid (heads, ceil(longest / 64), sequences), block (256), shared 35840 bytes
extern "C" __global__ void __launch_bounds__(PLAIN_THREADS, 2)
    attention_backward_queries(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                               const T* kv, const int* starts, const unsigned* documents, Attention size) {
    PlainShared& shared = shared_memory<PlainShared>();
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    const Head head(size, starts, documents, kv != nullptr, blockIdx.x);
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
        plain_mix(dq, ds, k, shared);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int query = queries.from + row + i;
        if (query < queries.to) {
            plain_give(dqkv + head.at_query(query), dq, i, size.scale, size.head_size, false);
        }
    }
}

#endif

#ifdef HAS_TENSOR_CORES

// ---- On tensor cores. ----

// What a lane holds of matrices that a warp multiplies (PTX ISA, mma.m16n8k16). With row = lane / 4 and
// column = lane % 4 * 2, two neighbours a register:
//   Left (16 × 16):  [row][column], [row + 8][column], [row][column + 8], [row + 8][column + 8]
//   right (16 × 8):  [column][row] and the one below, [column + 8][row] and the one below
//   Sum (16 × 8):    [row][column], [row][column + 1], [row + 8][column], [row + 8][column + 1]
struct Left {
    unsigned of[4];
};

struct Sum {
    float of[4];
};

// Four matrices of 8 × 8.
struct Matrices {
    unsigned of[4];
};

#ifdef EMULATOR

inline unsigned pack(float low, float high) {
    return static_cast<unsigned>(put(high).bits) << 16 | put(low).bits;
}

inline float power_of_two(float x) { return exp2f(x); }

inline unsigned shared_address(const void* at) {
    return static_cast<unsigned>(static_cast<const unsigned char*>(at) - emulator::dynamic_shared());
}

// sum += a b. Each lane shows its elements, numbered as in the PTX ISA.
inline void multiply(Sum& sum, const Left& a, unsigned b_0, unsigned b_1) {
    struct Lane {
        float a[8], b[4];
    };
    const auto element = [](unsigned bits, int which) {
        return get(T{static_cast<unsigned short>(bits >> 16 * which)});
    };
    Lane mine, lanes[WARP];
    for (int i = 0; i < 8; ++i) {
        mine.a[i] = element(a.of[i / 2], i % 2);
    }
    for (int i = 0; i < 4; ++i) {
        mine.b[i] = element(i < 2 ? b_0 : b_1, i % 2);
    }
    warp_exchange(mine, lanes);
    const int lane = threadIdx.x % WARP;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const float left = lanes[row % 8 * 4 + k % 8 / 2].a[k / 8 * 4 + row / 8 * 2 + k % 2];
            const float right = lanes[column * 4 + k % 8 / 2].b[k / 8 * 2 + k % 2];
            sum.of[i] += left * right;
        }
    }
}

// Lane i gives where row i % 8 of matrix i / 8 begins, and gets [row][column] and its neighbour of each;
// turned, [column][row] and the one below.
inline Matrices load(const T* row_at, bool is_turned) {
    const T* rows[WARP];
    hazards_read(row_at, 16);
    warp_exchange(row_at, rows);
    const emulator::Own own;
    const int row = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
    Matrices matrices;
    for (int i = 0; i < 4; ++i) {
        const T* const* const of = rows + 8 * i;
        const T low = is_turned ? of[column][row] : of[row][column];
        const T high = is_turned ? of[column + 1][row] : of[row][column + 1];
        matrices.of[i] = static_cast<unsigned>(high.bits) << 16 | low.bits;
    }
    return matrices;
}

#else

// Two elements in a register, the first in the lower half.
__device__ inline unsigned pack(float low, float high) {
    unsigned packed;
#if ELEMENT == 16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#elif __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    packed = static_cast<unsigned>(put(high).bits) << 16 | put(low).bits;
#endif
    return packed;
}

__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if __CUDA_ARCH__ >= 800

// sum += a b.
__device__ inline void multiply(Sum& sum, const Left& a, unsigned b_0, unsigned b_1) {
#if ELEMENT == 16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum.of[0]), "+f"(sum.of[1]), "+f"(sum.of[2]), "+f"(sum.of[3])
        : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "r"(b_0), "r"(b_1));
}

#else

// sum += a b, eight columns of a at a time (PTX ISA, mma.m16n8k8).
__device__ inline void multiply(Sum& sum, const Left& a, unsigned b_0, unsigned b_1) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
            " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(sum.of[0]), "+f"(sum.of[1]), "+f"(sum.of[2]), "+f"(sum.of[3])
            : "r"(a.of[2 * half]), "r"(a.of[2 * half + 1]), "r"(half == 0 ? b_0 : b_1));
    }
}

#endif

__device__ inline unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Lane i gives where row i % 8 of matrix i / 8 begins, and gets [row][column] and its neighbour of each;
// turned, [column][row] and the one below.
__device__ inline Matrices load(const T* row_at, bool is_turned) {
    Matrices x;
    if (is_turned) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.of[0]), "=r"(x.of[1]), "=r"(x.of[2]), "=r"(x.of[3])
                     : "r"(shared_address(row_at))
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.of[0]), "=r"(x.of[1]), "=r"(x.of[2]), "=r"(x.of[3])
                     : "r"(shared_address(row_at))
                     : "memory");
    }
    return x;
}

#if __CUDA_ARCH__ >= 800

// Begins to copy 4 or 16 bytes to shared memory; zeros, where they are not real.
template <int BYTES>
__device__ inline void copy(void* to, const void* from, bool is_real) {
    const unsigned address = shared_address(to);
    const int real = is_real ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(address), "l"(from), "r"(real)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     :
                     : "r"(address), "l"(from), "r"(real)
                     : "memory");
    }
}

__device__ inline void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#else

// Copies at once.
template <int BYTES>
__device__ inline void copy(void* to, const void* from, bool is_real) {
    using Words = Packed<unsigned, BYTES / 4>;
    *static_cast<Words*>(to) = is_real ? *static_cast<const Words*>(from) : Words{};
}

__device__ inline void await_copies() {}

#endif

#endif

#ifdef HAS_WGMMA

// ---- Products of a warpgroup: 64 rows, of which each warp has 16 as it has a Left and Sums. ----

constexpr int WARPGROUP = 4 * WARP;

// Of a matrix in shared memory whose rows have 128 bytes, swizzled, eight of them side by side (PTX ISA, "Matrix
// Descriptor Format"; CUTLASS, `GmmaDescriptor`).
struct Descriptor {
    unsigned address; // in 16 bytes, before it is swizzled

    __device__ unsigned long long bits() const {
        constexpr unsigned long long SWIZZLED_128 = 1ULL << 62, EIGHT_ROWS = 1024 >> 4, UNUSED = 1;
        return SWIZZLED_128 | EIGHT_ROWS << 32 | UNUSED << 16 | address;
    }
};

#ifdef EMULATOR

// An element of a described matrix, which has rows of 64 elements.
inline const T& described(Descriptor of, int row, int place) {
    const unsigned begin = (of.bits() & 0x3FFF) << 4, eight_rows = (of.bits() >> 32 & 0x3FFF) << 4;
    const unsigned at = begin + row / 8 * eight_rows + row % 8 * 128 + place * sizeof(T);
    return *reinterpret_cast<const T*>(emulator::dynamic_shared() + (at ^ (at >> 7 & 7) << 4));
}

// Of `rows` × `pieces` pieces of 16 bytes of a described matrix, those that a lane reads.
inline void read_described(std::vector<const void*>& read, Descriptor of, int first_row, int rows, int pieces) {
    const int count = rows * pieces / WARP;
    for (int i = threadIdx.x % WARP * count; i < static_cast<int>(threadIdx.x % WARP + 1) * count; ++i) {
        read.push_back(&described(of, first_row + i / pieces, i % pieces * 8));
    }
}

// Begins sums (+)= a b, for the 16 rows of a warp. `left`: an element of them. `read`: what was read of a.
template <class A>
void begin_product(const emulator::Own& own, Sum (&sums)[8], const A& left, Descriptor b, bool is_turned, bool add,
                   std::vector<const void*> read) {
    // Sixteen rows with 64 columns, or, turned, 64 rows of which it takes sixteen elements.
    read_described(read, b, 0, is_turned ? 16 : 64, is_turned ? 8 : 2);
    Sum products[8] = {};
    for (int i = 0; i < 32; ++i) {
        const int row = threadIdx.x % WARP / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const float right = get(is_turned ? described(b, k, column) : described(b, column, k));
            products[i / 4].of[i % 4] += left(row, k) * right;
        }
    }
    emulator::begin_product(own, read, [=, &sums] {
        for (int i = 0; i < 32; ++i) {
            float& sum = sums[i / 4].of[i % 4];
            sum = (add ? sum : 0) + products[i / 4].of[i % 4];
        }
    });
}

template <bool TURNED>
void multiply(Sum (&sums)[8], const Left& a, Descriptor b, bool add) {
    Left lanes[WARP];
    warp_exchange(a, lanes);
    const emulator::Own own;
    const auto left = [&](int row, int k) {
        const unsigned bits = lanes[row % 8 * 4 + k % 8 / 2].of[k / 8 * 2 + row / 8];
        return get(T{static_cast<unsigned short>(bits >> 16 * (k % 2))});
    };
    begin_product(own, sums, left, b, TURNED, add, {});
}

template <bool TURNED>
void multiply(Sum (&sums)[8], Descriptor a, Descriptor b, bool add) {
    const emulator::Own own;
    const int first = threadIdx.x % WARPGROUP / WARP * 16;
    std::vector<const void*> read;
    read_described(read, a, first, 16, 2);
    begin_product(own, sums, [&](int row, int k) { return get(described(a, first + row, k)); }, b, TURNED, add, read);
}

inline void begin_products() {}
inline void end_products() { emulator::end_products(); }

// Waits for all but the `LEFT` that were begun last.
template <int LEFT>
void await_products() {
    emulator::await_products(LEFT);
}

inline void show_to_products() { hazards_fence(); }

template <class S>
void hold(S&) {}

#else

// sums (+)= a b, begun. TURNED: b's rows are those of the product, else its columns.
#define SUM(i) "+f"(sums[i].of[0]), "+f"(sums[i].of[1]), "+f"(sums[i].of[2]), "+f"(sums[i].of[3])
#if ELEMENT == 16
#define WGMMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
#else
#define WGMMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
#endif
#define ALL_SUMS                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "

template <bool TURNED>
__device__ inline void multiply(Sum (&sums)[8], const Left& a, Descriptor b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n" WGMMA ALL_SUMS
                 "{%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
                 : SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5), SUM(6), SUM(7)
                 : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "l"(b.bits()), "r"(int(add)),
                   "n"(int(TURNED)));
}

template <bool TURNED>
__device__ inline void multiply(Sum (&sums)[8], Descriptor a, Descriptor b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n" WGMMA ALL_SUMS
                 "%32, %33, add, 1, 1, 0, %35;\n}"
                 : SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5), SUM(6), SUM(7)
                 : "l"(a.bits()), "l"(b.bits()), "r"(int(add)), "n"(int(TURNED)));
}

// Registers that were written before are read by the products that begin now.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all but the `LEFT` that were begun last.
template <int LEFT>
__device__ inline void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// What this thread has written to shared memory is seen by products that begin behind the next barrier.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The compiler moves no access of sums across this.
template <int STRIPS, int N>
__device__ inline void hold(Sum (&sums)[STRIPS][N]) {
    for (Sum& sum : sums[0]) {
        for (float& one : sum.of) {
            asm volatile("" : "+f"(one)::"memory");
        }
    }
}

#endif

#endif

constexpr float LOG2_E = 1.44269504f;

// Rows of channels in shared memory, for mma. They are eight elements longer than a head: eight of them meet no
// bank twice.
template <int HEAD_SIZE, int COUNT>
struct alignas(16) Padded {
    static constexpr int HEAD = HEAD_SIZE, ROWS = COUNT, PITCH = HEAD + 8;
    static constexpr int THREADS = WARP; // that multiply together

    T of[ROWS * PITCH];

    __device__ static constexpr int place(int row, int channel) { return row * PITCH + channel; }
};

#ifdef HAS_WGMMA

// Rows of channels in shared memory, for wgmma: 64 channels of all rows, then the next 64. In eight rows of 64
// channels, pieces of 16 bytes change places, so that a column of pieces meets no bank twice (PTX ISA,
// "Swizzling Modes", 128 bytes).
template <int HEAD_SIZE, int COUNT>
struct alignas(1024) Swizzled {
    static constexpr int HEAD = HEAD_SIZE, ROWS = COUNT, PITCH = 64;
    static constexpr int THREADS = WARPGROUP;

    T of[ROWS * HEAD];

    // Of an address: rows that lie a multiple of eight apart are PITCH apart each.
    __device__ static constexpr int place(int row, int channel) {
        return (channel / 64 * ROWS + row) * PITCH + (channel / 8 % 8 ^ row % 8) * 8 + channel % 8;
    }

    // Of the matrix that begins with this row, a multiple of eight, and channel: for a product over channels, a
    // multiple of 16; for one over rows, a multiple of 64.
    __device__ Descriptor descriptor(int row, int channel) const {
        const int behind = ((channel / 64 * ROWS + row) * PITCH + channel % 64) * sizeof(T);
        return {(shared_address(of) >> 4) + behind / 16};
    }
};

#endif

// Waits for this thread's copies. Behind the next barrier, all may multiply what was copied.
template <class Tile>
__device__ inline void await_tiles() {
    await_copies();
#ifdef HAS_WGMMA
    if constexpr (Tile::THREADS == WARPGROUP) {
        show_to_products();
    }
#endif
}

// Waits for all products that were begun: then their sums may be read.
template <class Tile, class... S>
__device__ inline void await_sums(S&... sums) {
#ifdef HAS_WGMMA
    if constexpr (Tile::THREADS == WARPGROUP) {
        await_products<0>();
        (hold(sums), ...);
    }
#endif
}

// Begins to copy rows, with zeros behind the last of them and behind their channels. A thread copies the same
// channels of every so many rows.
template <int THREADS, class Tile>
__device__ inline void copy_rows(Tile& tile, const Rows& rows) {
    constexpr int ROWS = Tile::ROWS, OF_ROW = Tile::HEAD / 8, STEP = THREADS / OF_ROW, PITCH = Tile::PITCH;
    static_assert(THREADS % OF_ROW == 0 && ROWS % STEP == 0, "threads copy whole rows");
    static_assert(Tile::THREADS == WARP || STEP % 8 == 0, "places of a thread's rows are alike");
    const bool is_aligned = reinterpret_cast<unsigned long long>(rows.at) % 16 == 0 && rows.channels % 8 == 0;
    const int first = threadIdx.x / OF_ROW, channel = threadIdx.x % OF_ROW * 8;
    const int count = rows.channels > channel ? rows.count - first : 0;
    const T* const from = rows.at + first * rows.stride + channel;
    T* const to = tile.of + Tile::place(first, channel);
    if (is_aligned) {
#pragma unroll
        for (int row = 0; row < ROWS; row += STEP) {
            copy<16>(to + row * PITCH, from + row * rows.stride, row < count);
        }
        return;
    }
    for (int row = 0; row < ROWS; row += STEP) {
        for (int i = 0; i < 8; ++i) {
            const bool is_real = row < count && channel + i < rows.channels;
            to[row * PITCH + i] = is_real ? from[row * rows.stride + i] : put(0.0f);
        }
    }
}

// Sixteen rows of a left side, of a warp. HELD: registers have room for them, so a lane reads them from shared
// memory once; else it reads them for each product.
template <class Tile, bool HELD>
struct Strip {
    const T* at;

    __device__ void take(const Tile& tile, int first) {
        const int lane = threadIdx.x % WARP;
        at = tile.of + Tile::place(first + lane % 16, lane / 16 * 8);
    }

    __device__ Left part(int channel) const {
        const Matrices x = load(at + channel, false);
        return {{x.of[0], x.of[1], x.of[2], x.of[3]}};
    }
};

template <class Tile>
struct Strip<Tile, true> {
    Left parts[Tile::HEAD / 16];

    __device__ void take(const Tile& tile, int first) {
        Strip<Tile, false> shared;
        shared.take(tile, first);
#pragma unroll
        for (int channel = 0; channel < Tile::HEAD; channel += 16) {
            parts[channel / 16] = shared.part(channel);
        }
    }

    __device__ Left part(int channel) const { return parts[channel / 16]; }
};

#ifdef HAS_WGMMA

// For wgmma: 64 rows of a warpgroup, which stay in shared memory.
template <int HEAD, int ROWS>
struct Strip<Swizzled<HEAD, ROWS>, false> {
    const Swizzled<HEAD, ROWS>* tile;

    __device__ void take(const Swizzled<HEAD, ROWS>& of, int) { tile = &of; }

    __device__ Descriptor part(int channel) const {
        return tile->descriptor(threadIdx.x / WARPGROUP * 64, channel);
    }
};

// They are read once, by warps.
template <int HEAD, int ROWS>
struct Strip<Swizzled<HEAD, ROWS>, true> {
    Left parts[HEAD / 16];

    __device__ void take(const Swizzled<HEAD, ROWS>& tile, int first) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int channel = 0; channel < HEAD; channel += 16) {
            const Matrices x = load(tile.of + tile.place(first + lane % 16, channel + lane / 16 * 8), false);
            parts[channel / 16] = {{x.of[0], x.of[1], x.of[2], x.of[3]}};
        }
    }

    __device__ const Left& part(int channel) const { return parts[channel / 16]; }
};

#endif

// A warp's strips of a tile.
template <class Tile, bool HELD, int STRIPS>
__device__ inline void take(Strip<Tile, HELD> (&strips)[STRIPS], const Tile& tile) {
    const int first = threadIdx.x / WARP * 16 * STRIPS;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
        strips[strip].take(tile, first + 16 * strip);
    }
}

// The sums of a warp's strips, with so many columns.
template <int STRIPS, int COLUMNS>
using Sums = Sum[STRIPS][COLUMNS / 8];

// Two sums side by side lie in a warp as one left side does.
__device__ inline Left left_of(const Sum& first, const Sum& second) {
    return {{pack(first.of[0], first.of[1]), pack(first.of[2], first.of[3]),
             pack(second.of[0], second.of[1]), pack(second.of[2], second.of[3])}};
}

// Products of strips of a and each row of b, over all channels.
template <int HEAD, int COLUMNS, class A, bool HELD, int STRIPS>
__device__ inline void products(Sums<STRIPS, COLUMNS>& sums, const Strip<A, HELD> (&a)[STRIPS],
                                const Padded<HEAD, COLUMNS>& tile) {
    constexpr int PITCH = Padded<HEAD, COLUMNS>::PITCH;
    const int lane = threadIdx.x % WARP;
    const T* const b = tile.of + tile.place(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    for (auto& of_strip : sums) {
        for (Sum& sum : of_strip) {
            sum = {};
        }
    }
#pragma unroll
    for (int channel = 0; channel < HEAD; channel += 16) {
        Left left[STRIPS];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            left[strip] = a[strip].part(channel);
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; column += 16) {
            const Matrices right = load(b + column * PITCH + channel, false);
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                multiply(sums[strip][column / 8], left[strip], right.of[0], right.of[1]);
                multiply(sums[strip][column / 8 + 1], left[strip], right.of[2], right.of[3]);
            }
        }
    }
}

// sums += p x: p has a column for each row of x, of which it takes COLUMNS channels from `part` on.
template <int COLUMNS, int HEAD, int MIXED, int STRIPS>
__device__ inline void mix(Sums<STRIPS, COLUMNS>& sums, const Sums<STRIPS, MIXED>& p,
                           const Padded<HEAD, MIXED>& tile, int part = 0) {
    constexpr int PITCH = Padded<HEAD, MIXED>::PITCH;
    const int lane = threadIdx.x % WARP;
    const T* const x = tile.of + tile.place(lane % 16, lane / 16 * 8) + part;
#pragma unroll
    for (int row = 0; row < MIXED; row += 16) {
        Left left[STRIPS];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            left[strip] = left_of(p[strip][row / 8], p[strip][row / 8 + 1]);
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; column += 16) {
            const Matrices right = load(x + row * PITCH + column, true);
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                multiply(sums[strip][column / 8], left[strip], right.of[0], right.of[1]);
                multiply(sums[strip][column / 8 + 1], left[strip], right.of[2], right.of[3]);
            }
        }
    }
}

#ifdef HAS_WGMMA

// The same products, begun.
template <int HEAD, class A, bool HELD>
__device__ inline void products(Sums<1, 64>& sums, const Strip<A, HELD> (&a)[1], const Swizzled<HEAD, 64>& b) {
    hold(sums);
    begin_products();
#pragma unroll
    for (int channel = 0; channel < HEAD; channel += 16) {
        multiply<false>(sums[0], a[0].part(channel), b.descriptor(0, channel), channel > 0);
    }
    end_products();
}

// Sums side by side, as left sides.
template <int N>
__device__ inline void pack_sums(Left (&left)[N], const Sum (&sums)[2 * N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        left[i] = left_of(sums[2 * i], sums[2 * i + 1]);
    }
}

// sums += p x, begun.
template <int HEAD, int MIXED>
__device__ inline void mix(Sums<1, HEAD>& sums, const Left (&p)[MIXED / 16], const Swizzled<HEAD, MIXED>& x) {
    hold(sums);
    begin_products();
#pragma unroll
    for (int row = 0; row < MIXED; row += 16) {
#pragma unroll
        for (int channel = 0; channel < HEAD; channel += 64) {
            Sum(&part)[8] = reinterpret_cast<Sum(&)[8]>(sums[0][channel / 8]);
            multiply<true>(part, p[row / 16], x.descriptor(row, channel), true);
        }
    }
    end_products();
}

template <int COLUMNS, int HEAD, int MIXED>
__device__ inline void mix(Sums<1, COLUMNS>& sums, const Sums<1, MIXED>& p, const Swizzled<HEAD, MIXED>& x,
                           int = 0) {
    static_assert(COLUMNS == HEAD, "all channels");
    Left left[MIXED / 16];
    pack_sums(left, p[0]);
    mix(sums, left, x);
}

#endif

// Writes (or adds) half of a lane's sums, one row, to channels first..channels of a head.
template <class E, int COLUMNS>
__device__ inline void give(E* to, const Sum (&sums)[COLUMNS], int half, float by, int first, int channels,
                            bool add) {
    const bool is_paired =
        sizeof(E) == 2 && channels % 2 == 0 && reinterpret_cast<unsigned long long>(to) % 4 == 0;
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
        const int channel = first + column * 8 + threadIdx.x % 4 * 2;
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

// Of a tile's positions, those of this warp, or of so many threads, each with so many positions.
template <int POSITIONS, int THREADS = WARP>
__device__ inline Span part_of(Span tile) {
    const int from = tile.from + static_cast<int>(threadIdx.x) / THREADS * POSITIONS;
    return {min(from, tile.to), min(from + POSITIONS, tile.to)};
}

__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}

__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_MASK, x, 1);
    return x + __shfl_xor_sync(FULL_MASK, x, 2);
}

template <int HEAD, int KEYS, int QUERIES>
struct ForwardShared {
    Padded<HEAD, QUERIES> queries;
    Padded<HEAD, KEYS> keys, values;
    unsigned char kept[QUERIES * KEYS / 4];
};

// Hides scores of keys that are not seen, of a lane's two queries and of keys from `from` on.
template <int N>
__device__ inline void hide(Sum (&p)[N], const Head& head, int query, int last_query, int from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Span seen = head.seen(min(query + 8 * half, last_query));
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            if (!seen.has(from + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2)) {
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

// Of what a lane's two queries of a strip have seen so far: the largest score, and the sum of all powers.
struct Softmax {
    float most[2] = {-infinity(), -infinity()}, total[2] = {};

    // Scores become powers. What was mixed before is to shrink, where a larger score comes.
    template <int N>
    __device__ void add(Sum (&p)[N], float (&shrink)[2], float scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = most[half];
#pragma unroll
            for (const Sum& sum : p) {
                largest = fmaxf(largest, fmaxf(sum.of[2 * half], sum.of[2 * half + 1]));
            }
            largest = quad_max(largest);
            // A query may see nothing of the first tiles.
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

// A warp has 16 STRIPS queries; HELD: in registers.
template <int HEAD, int KEYS, int WARPS, int STRIPS, bool HELD>
__device__ inline void forward(T* y, float* lse, const T* qkv, const T* kv, const int* starts,
                               const unsigned* documents, const Attention& size) {
    constexpr int THREADS = WARP * WARPS, QUERIES = 16 * STRIPS * WARPS;
    using Shared = ForwardShared<HEAD, KEYS, QUERIES>;
    Shared& shared = shared_memory<Shared>();
    const int row = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
    const Head head(size, starts, documents, kv != nullptr, blockIdx.x);
    const T* const keys_at = kv != nullptr ? kv : qkv;
    // The longest rows come first.
    const Span queries = head.tile(size.past, gridDim.y - 1 - blockIdx.y, QUERIES);
    if (queries.count() <= 0) {
        return; // behind the end of a shorter sequence
    }
    const Span mine = part_of<16 * STRIPS>(queries);
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
    Strip<Padded<HEAD, QUERIES>, HELD> q[STRIPS];
    if (HELD) {
        await_copies();
        __syncthreads();
    }
    take(q, shared.queries);
    for (int from = first; from < sight.last.to; from += KEYS) {
        const bool is_seen = sight_of_mine.touches({from, from + KEYS});
        // While scores are computed, values come; while values are mixed, the next keys.
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
            if (size.dropout.threshold != 0) {
#pragma unroll
                for (int i = 0; i < STRIPS * KEYS / 2; ++i) {
                    const int strip = i / (KEYS / 2), of = i % (KEYS / 2);
                    const int query = mine.from - queries.from + 16 * strip + row + of % 4 / 2 * 8;
                    const int key = of / 4 * 8 + column + of % 2;
                    p[strip][of / 4].of[of % 4] *= head.factor(shared.kept, query, key, KEYS);
                }
            }
            mix<HEAD>(mixed, p, shared.values);
        }
    }
    await_copies(); // where nothing is seen
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; ++i) {
        const int strip = i / 2, half = i % 2, query = mine.from + row + 8 * i;
        const float sum = quad_sum(softmax[strip].total[half]);
        if (query >= mine.to) {
            continue;
        }
        give(y + head.at(query), mixed[strip], half, 1.0f / sum, 0, size.head_size, false);
        if (column == 0) {
            lse[head.statistic(query)] = softmax[strip].most[half] * size.scale + logf(sum);
        }
    }
}

#ifdef HAS_WGMMA

template <int HEAD, int KEYS, int QUERIES>
struct AheadShared {
    Swizzled<HEAD, QUERIES> queries;
    Swizzled<HEAD, KEYS> keys[2], values[2];
    unsigned char kept[2][QUERIES * KEYS / 4];
};

// By wgmma: while a tile's scores become powers, tensor cores compute those of the next tile.
template <int HEAD, int KEYS>
__device__ inline void forward_ahead(T* y, float* lse, const T* qkv, const T* kv, const int* starts,
                                     const unsigned* documents, const Attention& size) {
    constexpr int THREADS = 2 * WARPGROUP, QUERIES = 128;
    using Shared = AheadShared<HEAD, KEYS, QUERIES>;
    using Keys = Swizzled<HEAD, KEYS>;
    Shared& shared = shared_memory<Shared>();
    const int row = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
    const Head head(size, starts, documents, kv != nullptr, blockIdx.x);
    const T* const keys_at = kv != nullptr ? kv : qkv;
    // The longest rows come first.
    const Span queries = head.tile(size.past, gridDim.y - 1 - blockIdx.y, QUERIES);
    if (queries.count() <= 0) {
        return; // behind the end of a shorter sequence
    }
    const Span mine = part_of<16>(queries);
    const Sight sight = head.sight(queries), sight_of_mine = head.sight(mine);
    const float scale = size.scale * LOG2_E;
    const int first = sight.first.from / KEYS * KEYS;
    const int tiles = max(0, (sight.last.to - first + KEYS - 1) / KEYS);
    const auto tile = [&](int index) {
        const int from = first + index * KEYS;
        return Span{from, min(from + KEYS, sight.last.to)};
    };
    const auto begin_keys = [&](int index) {
        if (index < tiles) {
            copy_rows<THREADS>(shared.keys[index % 2], head.keys(keys_at, 0, tile(index)));
            head.draw(shared.kept[index % 2], queries.from, tile(index).from, QUERIES, KEYS);
        }
    };
    const auto begin_values = [&](int index) {
        if (index < tiles) {
            copy_rows<THREADS>(shared.values[index % 2], head.keys(keys_at, 1, tile(index)));
        }
    };

    Softmax softmax;
    Sums<1, HEAD> mixed = {};
    Sums<1, KEYS> p;
    float shrink[2];
    // The scores of a tile become powers.
    const auto add = [&](int index) {
        const int from = first + index * KEYS;
        if (!sight_of_mine.covers({from, from + KEYS})) {
            hide(p[0], head, mine.from + row, queries.to - 1, from);
        }
        softmax.add(p[0], shrink, scale);
        if (size.dropout.threshold != 0) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) {
                const int query = mine.from - queries.from + row + i % 4 / 2 * 8, key = i / 4 * 8 + column + i % 2;
                p[0][i / 4].of[i % 4] *= head.factor(shared.kept[index % 2], query, key, KEYS);
            }
        }
    };
    Strip<Swizzled<HEAD, QUERIES>, true> q[1];
    Left powers[KEYS / 16];
    const auto turn = [&] {
        await_tiles<Keys>();
        __syncthreads(); // what was copied is there, and nobody reads what was there before
    };
    copy_rows<THREADS>(shared.queries, head.queries(qkv, queries));
    begin_keys(0);
    turn();
    begin_keys(1);
    begin_values(0);
    take(q, shared.queries);
    if (tiles > 0) {
        products(p, q, shared.keys[0]);
        await_sums<Keys>(p);
        add(0);
        pack_sums(powers, p[0]);
    }
    for (int index = 0; index + 1 < tiles; ++index) {
        turn();
        begin_keys(index + 2);
        begin_values(index + 1);
        products(p, q, shared.keys[(index + 1) % 2]);
        mix(mixed, powers, shared.values[index % 2]);
        await_products<1>();
        hold(p);
        add(index + 1); // while values are mixed
        await_products<0>();
        hold(mixed);
        shrink_sums(mixed[0], shrink);
        pack_sums(powers, p[0]);
    }
    turn();
    if (tiles > 0) {
        mix(mixed, powers, shared.values[(tiles - 1) % 2]);
        await_sums<Keys>(mixed);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = mine.from + row + 8 * half;
        const float sum = quad_sum(softmax.total[half]);
        if (query >= mine.to) {
            continue;
        }
        give(y + head.at(query), mixed[0], half, 1.0f / sum, 0, size.head_size, false);
        if (column == 0) {
            lse[head.statistic(query)] = softmax.most[half] * size.scale + logf(sum);
        }
    }
}

#endif

// What the pass of keys reads of a tile of queries.
template <template <int, int> class Tile, int HEAD, int QUERIES, int KEYS>
struct QueriesStage {
    Tile<HEAD, QUERIES> queries, dy;
    float lse[QUERIES], delta[QUERIES];
    Span seen[QUERIES];
    unsigned char kept[QUERIES * KEYS / 4];
};

template <template <int, int> class Tile, int HEAD, int QUERIES, int KEYS, int STAGES>
struct BackwardKeysShared {
    Tile<HEAD, KEYS> keys, values;
    QueriesStage<Tile, HEAD, QUERIES, KEYS> stages[STAGES];
};

// A warp has 16 STRIPS keys; HELD: in registers, and their values. A block writes COLUMNS channels of the head:
// where registers do not hold all, more blocks do. DROPS: there is dropout, whose code takes registers.
template <template <int, int> class Tile, int HEAD, int QUERIES, int WARPS, int STAGES, int COLUMNS, int STRIPS,
          bool HELD, bool DROPS>
__device__ inline void keys_pass(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                 const T* qkv, const T* kv, const int* starts,
                                 const unsigned* documents, const Attention& size, bool accumulate,
                                 int shares) {
    constexpr int KEYS = 16 * STRIPS * WARPS, THREADS = WARP * WARPS, PARTS = HEAD / COLUMNS;
    constexpr int TOGETHER = Tile<HEAD, KEYS>::THREADS / WARP * 16 * STRIPS;
    using Keys = Tile<HEAD, KEYS>;
    using Shared = BackwardKeysShared<Tile, HEAD, QUERIES, KEYS, STAGES>;
    Shared& shared = shared_memory<Shared>();
    const int row = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
    const int group = size.heads / size.kv_heads / shares, part = blockIdx.x % PARTS * COLUMNS;
    Head head(size, starts, documents, kv != nullptr, blockIdx.x / PARTS * group);
    const T* const keys_at = kv != nullptr ? kv : qkv;
    // The first keys are seen by the most queries.
    const Span keys = head.tile(0, blockIdx.y, KEYS), mine = part_of<16 * STRIPS>(keys);
    const Span ours = part_of<TOGETHER, Keys::THREADS>(keys);
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
    Strip<Keys, HELD> k[STRIPS], v[STRIPS];
    if (HELD) {
        await_tiles<Keys>();
        __syncthreads();
    }
    take(k, shared.keys);
    take(v, shared.values);
    for (int index = 0; index < all; ++index) {
        await_tiles<Keys>();
        __syncthreads(); // this tile is there, and nobody reads the one before
        if (STAGES > 1 && index + 1 < all) {
            stage(index + 1);
        }
        const auto& of = shared.stages[index % STAGES];
        const Span queries = head.tile(first, index % tiles, QUERIES);
        const Sight sight = {of.seen[0], of.seen[queries.count() - 1]};
        if (ours.count() > 0 && sight.touches(ours)) {
            // Turned: rows are keys, columns are queries.
            Sums<STRIPS, QUERIES> p, ds;
            products(p, k, of.queries);
            products(ds, v, of.dy);
            await_sums<Keys>(p, ds);
            // Query and key of a lane's element with this index in its strip.
            const auto query_of = [&](int at) { return at / 4 * 8 + column + at % 2; };
            const auto key_of = [&](int strip, int at) { return mine.from + 16 * strip + row + at % 4 / 2 * 8; };
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
            await_sums<Keys>(dv, dk);
        }
        if (STAGES == 1 && index + 1 < all) {
            __syncthreads();
            stage(index + 1);
        }
    }
    await_copies(); // where nobody sees them
    if (dkv != nullptr) {
        head.is_apart = true;
        dkv += block_again() / PARTS % shares * head.all_keys();
    }
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; ++i) {
        const int strip = i / 2, half = i % 2, key = mine.from + row + 8 * i;
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

template <template <int, int> class Tile, int HEAD, int QUERIES, int WARPS, int STAGES, int COLUMNS, int STRIPS,
          bool HELD>
__device__ inline void backward_keys(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                     const T* qkv, const T* kv, const int* starts,
                                     const unsigned* documents, const Attention& size, bool accumulate,
                                     int shares) {
    if (size.dropout.threshold == 0) {
        keys_pass<Tile, HEAD, QUERIES, WARPS, STAGES, COLUMNS, STRIPS, HELD, false>(
            dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size, accumulate, shares);
    } else {
        keys_pass<Tile, HEAD, QUERIES, WARPS, STAGES, COLUMNS, STRIPS, HELD, true>(
            dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size, accumulate, shares);
    }
}

// What the pass of queries reads of a tile of keys.
template <template <int, int> class Tile, int HEAD, int KEYS, int QUERIES>
struct KeysStage {
    Tile<HEAD, KEYS> keys, values;
    unsigned char kept[QUERIES * KEYS / 4];
};

template <template <int, int> class Tile, int HEAD, int KEYS, int QUERIES, int STAGES>
struct BackwardQueriesShared {
    Tile<HEAD, QUERIES> queries, dy;
    KeysStage<Tile, HEAD, KEYS, QUERIES> stages[STAGES];
};

// A warp has 16 STRIPS queries; HELD: in registers, and dy.
template <template <int, int> class Tile, int HEAD, int KEYS, int WARPS, int STAGES, int STRIPS, bool HELD>
__device__ inline void backward_queries(T* dqkv, const T* dy, const float* lse, const float* delta,
                                        const T* qkv, const T* kv, const int* starts,
                                        const unsigned* documents, const Attention& size) {
    constexpr int QUERIES = 16 * STRIPS * WARPS, THREADS = WARP * WARPS;
    using Queries = Tile<HEAD, QUERIES>;
    constexpr int TOGETHER = Queries::THREADS / WARP * 16 * STRIPS;
    using Shared = BackwardQueriesShared<Tile, HEAD, KEYS, QUERIES, STAGES>;
    Shared& shared = shared_memory<Shared>();
    const int row = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
    const Head head(size, starts, documents, kv != nullptr, blockIdx.x);
    const T* const keys_at = kv != nullptr ? kv : qkv;
    const Span queries = head.tile(size.past, gridDim.y - 1 - blockIdx.y, QUERIES);
    if (queries.count() <= 0) {
        return;
    }
    const Span mine = part_of<16 * STRIPS>(queries);
    const Sight sight = head.sight(queries), sight_of_mine = head.sight(mine);
    const Sight sight_of_ours = head.sight(part_of<TOGETHER, Queries::THREADS>(queries));
    const float scale = size.scale * LOG2_E;
    // Of a lane's rows.
    float of_lse[2 * STRIPS], of_delta[2 * STRIPS];
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; ++i) {
        const int query = min(mine.from + row + 8 * i, queries.to - 1);
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
    Strip<Queries, HELD> q[STRIPS], d_out[STRIPS];
    if (HELD) {
        await_tiles<Queries>();
        __syncthreads();
    }
    take(q, shared.queries);
    take(d_out, shared.dy);
    for (int from = first; from < sight.last.to; from += KEYS) {
        await_tiles<Queries>();
        __syncthreads(); // this tile is there, and nobody reads the one before
        if (STAGES > 1 && from + KEYS < sight.last.to) {
            stage(from + KEYS);
        }
        const auto& of = shared.stages[from / KEYS % STAGES];
        if (sight_of_ours.touches({from, from + KEYS})) {
            Sums<STRIPS, KEYS> p, ds;
            products(p, q, of.keys);
            products(ds, d_out, of.values);
            await_sums<Queries>(p, ds);
            // Row and key of a lane's element with this index in its strip.
            const auto row_of = [&](int strip, int at) { return 2 * strip + at % 4 / 2; };
            const auto key_of = [&](int at) { return at / 4 * 8 + column + at % 2; };
            if (!sight_of_mine.covers({from, from + KEYS})) {
#pragma unroll
                for (int of_row = 0; of_row < 2 * STRIPS; ++of_row) {
                    const Span seen = head.seen(min(mine.from + row + 8 * of_row, queries.to - 1));
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
                    const int query = mine.from - queries.from + row + 8 * row_of(strip, at);
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
            await_sums<Queries>(dq);
        }
        if (STAGES == 1 && from + KEYS < sight.last.to) {
            __syncthreads();
            stage(from + KEYS);
        }
    }
    await_copies(); // where nothing is seen
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; ++i) {
        const int query = mine.from + row + 8 * i;
        if (query < mine.to) {
            give(dqkv + head.at_query(query), dq[i / 2], i % 2, size.scale, 0, size.head_size, false);
        }
    }
}

// ---- The kernels, by the head size that they pad to. ----

// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 22528 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_32(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                 Attention size) {
    forward<32, 64, 4, 2, true>(y, lse, qkv, kv, starts, documents, size);
}

// launch: grid (shares kv_heads, ceil((past + longest) / 128), sequences), block (128), shared 33792 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_32(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                               const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                               Attention size, int accumulate, int shares) {
    backward_keys<Padded, 32, 32, 4, 2, 32, 2, true>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                             accumulate != 0, shares);
}

// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 32768 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_32(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                  const T* kv, const int* starts, const unsigned* documents,
                                  Attention size) {
    backward_queries<Padded, 32, 32, 4, 2, 2, true>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}

// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 38912 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_64(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                 Attention size) {
    forward<64, 64, 4, 2, false>(y, lse, qkv, kv, starts, documents, size);
}

// launch: grid (shares kv_heads, ceil((past + longest) / 128), sequences), block (128), shared 58368 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_64(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                               const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                               Attention size, int accumulate, int shares) {
    backward_keys<Padded, 64, 32, 4, 2, 64, 2, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                              accumulate != 0, shares);
}

// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 57344 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_64(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                  const T* kv, const int* starts, const unsigned* documents,
                                  Attention size) {
    backward_queries<Padded, 64, 32, 4, 2, 2, false>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}

// launch: grid (heads, ceil(longest / 128), sequences), block (128), shared 53248 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_128(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                  Attention size) {
    forward<128, 32, 4, 2, false>(y, lse, qkv, kv, starts, documents, size);
}

// launch: grid (shares kv_heads, ceil((past + longest) / 64), sequences), block (128), shared 71680 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_128(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                Attention size, int accumulate, int shares) {
    backward_keys<Padded, 128, 32, 4, 2, 128, 1, true>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                               accumulate != 0, shares);
}

// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 70656 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_128(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                   const T* kv, const int* starts, const unsigned* documents,
                                   Attention size) {
    backward_queries<Padded, 128, 32, 4, 2, 1, true>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}

// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 68096 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_256(T* y, float* lse, const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                  Attention size) {
    forward<256, 32, 4, 1, false>(y, lse, qkv, kv, starts, documents, size);
}

// launch: grid (2 shares kv_heads, ceil((past + longest) / 64), sequences), block (128), shared 84992 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_256(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                Attention size, int accumulate, int shares) {
    backward_keys<Padded, 256, 16, 4, 1, 128, 1, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                                accumulate != 0, shares);
}

// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 84736 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_256(T* dqkv, const T* dy, const float* lse, const float* delta, const T* qkv,
                                   const T* kv, const int* starts, const unsigned* documents,
                                   Attention size) {
    backward_queries<Padded, 256, 16, 4, 1, 1, false>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}

// ---- For sm_75, whose blocks have at most 64 KiB of shared memory: instead of those above that take more. ----

#if ELEMENT == 15 && (defined EMULATOR || __CUDA_ARCH__ < 800)

// launch: grid (shares kv_heads, ceil((past + longest) / 64), sequences), block (128), shared 53248 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_keys_128_64k(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                    const T* qkv, const T* kv, const int* starts,
                                    const unsigned* documents, Attention size, int accumulate, int shares) {
    backward_keys<Padded, 128, 32, 4, 1, 128, 1, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                               accumulate != 0, shares);
}

// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 52736 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_queries_128_64k(T* dqkv, const T* dy, const float* lse, const float* delta,
                                       const T* qkv, const T* kv, const int* starts,
                                       const unsigned* documents, Attention size) {
    backward_queries<Padded, 128, 32, 4, 1, 1, true>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}

// launch: grid (heads, ceil(longest / 64), sequences), block (128), shared 50944 bytes
extern "C" __global__ void __launch_bounds__(128)
    attention_256_64k(T* y, float* lse, const T* qkv, const T* kv, const int* starts,
                      const unsigned* documents, Attention size) {
    forward<256, 16, 4, 1, false>(y, lse, qkv, kv, starts, documents, size);
}

// launch: grid (2 shares kv_heads, ceil((past + longest) / 32), sequences), block (64), shared 51072 bytes
extern "C" __global__ void __launch_bounds__(64)
    attention_backward_keys_256_64k(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                    const T* qkv, const T* kv, const int* starts,
                                    const unsigned* documents, Attention size, int accumulate, int shares) {
    backward_keys<Padded, 256, 16, 2, 1, 128, 1, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts, documents, size,
                                                accumulate != 0, shares);
}

// launch: grid (heads, ceil(longest / 32), sequences), block (64), shared 50816 bytes
extern "C" __global__ void __launch_bounds__(64)
    attention_backward_queries_256_64k(T* dqkv, const T* dy, const float* lse, const float* delta,
                                       const T* qkv, const T* kv, const int* starts,
                                       const unsigned* documents, Attention size) {
    backward_queries<Padded, 256, 16, 2, 1, 1, false>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}

#endif

// ---- By wgmma. ----

#ifdef HAS_WGMMA

// launch: grid (heads, ceil(longest / 128), sequences), block (256), shared 53248 bytes
extern "C" __global__ void __launch_bounds__(256)
    attention_64_wgmma(T* y, float* lse, const T* qkv, const T* kv, const int* starts,
                  const unsigned* documents, Attention size) {
    forward_ahead<64, 64>(y, lse, qkv, kv, starts, documents, size);
}

// launch: grid (shares kv_heads, ceil((past + longest) / 128), sequences), block (256), shared 71680 bytes
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_keys_64_wgmma(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                Attention size, int accumulate, int shares) {
    backward_keys<Swizzled, 64, 64, 8, 2, 64, 1, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts,
                                                         documents, size, accumulate != 0, shares);
}

// launch: grid (heads, ceil(longest / 128), sequences), block (256), shared 69632 bytes
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_queries_64_wgmma(T* dqkv, const T* dy, const float* lse, const float* delta,
                                   const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                   Attention size) {
    backward_queries<Swizzled, 64, 64, 8, 2, 1, true>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}

// launch: grid (heads, ceil(longest / 128), sequences), block (256), shared 102400 bytes
extern "C" __global__ void __launch_bounds__(256)
    attention_128_wgmma(T* y, float* lse, const T* qkv, const T* kv, const int* starts,
                  const unsigned* documents, Attention size) {
    forward_ahead<128, 64>(y, lse, qkv, kv, starts, documents, size);
}

// launch: grid (shares kv_heads, ceil((past + longest) / 128), sequences), block (256), shared 137216 bytes
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_keys_128_wgmma(T* dqkv, float* dkv, const T* dy, const float* lse, const float* delta,
                                const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                Attention size, int accumulate, int shares) {
    backward_keys<Swizzled, 128, 64, 8, 2, 128, 1, false>(dqkv, dkv, dy, lse, delta, qkv, kv, starts,
                                                         documents, size, accumulate != 0, shares);
}

// launch: grid (heads, ceil(longest / 128), sequences), block (256), shared 135168 bytes
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_queries_128_wgmma(T* dqkv, const T* dy, const float* lse, const float* delta,
                                   const T* qkv, const T* kv, const int* starts, const unsigned* documents,
                                   Attention size) {
    backward_queries<Swizzled, 128, 64, 8, 2, 1, true>(dqkv, dy, lse, delta, qkv, kv, starts, documents, size);
}

#endif

#endif
