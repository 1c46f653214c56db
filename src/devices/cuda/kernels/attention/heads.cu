// Scaled dot-product attention in tiles (Dao et al. 2022), without memory for tokens × tokens.
//
// A block owns a tile of queries of one head (forward, dq) or a tile of keys (dk, dv) and walks the other
// side in order, so every sum is made by one block in one order. dq has a pass of its own.
//
// Each of the three passes is written in two ways. Elements of 16 bits are multiplied by tensor cores: the kernels'
// names have the head size that they pad to, of 32, 64, 128 and 256 the smallest that holds a head. Floats are
// multiplied without tensor cores, in one plain way for heads of all sizes. Heads of more than 256 channels, up to 512,
// take the plain way with all elements.
//
// The files of this folder are compiled as one: heads, plain, plain_kernels, warp, mma, quad_pairs, tiles, passes,
// cores. The kernels take long to compile, so l2l compiles them side by side: each time, ONLY is the number of a kernel.
// Without ONLY, all kernels are compiled.
#ifdef ONLY
#define COMPILES(kernel) (ONLY == (kernel))
#else
#define COMPILES(kernel) 1
#endif

// Numbers of kernels. To a pass, the head size that its kernel pads to is added; the plain way adds nothing, or 512
// for wide heads.
#define DELTA_PASS 0
#define FORWARD_PASS 1000
#define KEYS_PASS 2000
#define QUERIES_PASS 3000

// ---- Masks, and places of queries and keys. ----

// Positions from..to of a sequence.
struct Span {
    int from, to;

    __device__ int count() const { return to - from; }
    __device__ bool has(int position) const { return from <= position && position < to; }
};

// The keys that the first and the last of some queries see. Both ends of that span grow with the query, so the two
// bound what the others see.
struct Sight {
    Span first, last;

    // False if no query sees any of the keys.
    __device__ bool touches(Span keys) const { return keys.from < last.to && first.from < keys.to; }
    // True if all queries see all of the keys.
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
    bool is_apart; // whether keys and values are in a tensor of their own, and not beside their queries
    int sequence, head, kv_head;
    // Keys and values in a tensor of their own are of one sequence. Pointers to them are to its first position, even
    // if the tensor begins later.
    Sequence rows;

    __device__ Head(const Attention& size, const int* starts, const unsigned* documents, bool is_apart, int head)
        : size(size), documents(documents), is_apart(is_apart), sequence(blockIdx.z), head(head),
          kv_head(head / (size.heads / size.kv_heads)),
          rows(sequence_at(starts, size.sequences, size.rows, blockIdx.z)) {}

    // The position past the last.
    __device__ int end() const { return size.past + rows.count; }

    // The `index`-th tile of `positions` positions, counted from `first`.
    __device__ Span tile(int first, int index, int positions) const {
        const int from = first + index * positions;
        return {from, min(from + positions, end())};
    }

    __device__ long long row(int position) const {
        return static_cast<long long>(rows.first) + position - size.past;
    }

    // Where this head's columns of a query begin in a (R, H D) tensor.
    __device__ long long at(int position) const {
        return (row(position) * size.heads + head) * size.head_size;
    }

    // Where this head's query of a position begins.
    __device__ long long at_query(int position) const {
        return (row(position) * (size.heads + 2 * size.kv_heads) + head) * size.head_size;
    }

    // The distance of one position's keys and the next one's, in heads.
    __device__ int key_stride() const { return (is_apart ? 0 : size.heads) + 2 * size.kv_heads; }

    // Where this head's key (0) or value (1) of a position begins.
    __device__ long long at_key(int position, int which) const {
        const int before = is_apart ? 0 : size.heads;
        const long long place = rows.first + position;
        return (place * key_stride() + before + which * size.kv_heads + kv_head) * size.head_size;
    }

    // Elements of all keys and values, where they are in a tensor of their own.
    __device__ long long all_keys() const {
        return static_cast<long long>(size.past + size.rows - size.first_kept) * key_stride() * size.head_size;
    }

    // Index of a query among numbers that are laid out sequence by sequence, head by head.
    __device__ long long statistic(int position) const {
        return static_cast<long long>(rows.first) * size.heads + head * rows.count + position - size.past;
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
        const long long place = rows.first + position;
        return {static_cast<int>(documents[2 * place]), static_cast<int>(documents[2 * place + 1])};
    }

    // Keys that a query sees.
    __device__ Span seen(int query) const {
        Span span = document(query);
#if ELEMENT == 32 // the same in fewer registers of sm_70, where the plain way has none to spare
        const int last = size.ahead == 1 ? query + 1 : end();
        span.to = min(span.to, size.window > 0 ? min(last, query + size.window) : last);
#else
        span.to = min(span.to, size.ahead > 0 ? query + size.ahead : end());
#endif
        span.from = size.window > 0 ? max(span.from, query + 1 - size.window) : span.from;
        return span;
    }

    __device__ Sight sight(Span queries) const {
        return queries.from < queries.to ? Sight{seen(queries.from), seen(queries.to - 1)} : Sight{};
    }

    // Queries that may see some of the keys.
    __device__ Span seeing(Span keys) const {
        const Span first = document(keys.from), last = document(keys.to - 1);
        Span span = {size.ahead > 0 ? max(first.from, keys.from + 1 - size.ahead) : first.from, last.to};
        span.to = size.window > 0 ? min(span.to, keys.to - 1 + size.window) : span.to;
        return {max(span.from, size.past), min(span.to, end())};
    }

    // Draws a tile's dropout mask. A byte of `kept` is for one query and four keys, with a bit for each key.
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

    // The dropout factor of one query and one key, in a tile of `keys` keys.
    __device__ float factor(const unsigned char* kept, int query, int key, int keys) const {
        return kept[query * (keys / 4) + key / 4] >> key % 4 & 1 ? size.dropout.scale : 0.0f;
    }
};

#if COMPILES(DELTA_PASS)
// This lane's share of Σ y dy: of every 32 channels one.
__device__ inline float lane_product(const T* y, const T* dy, int lane, int channels) {
    float sum = 0.0f;
    for (int channel = lane; channel < channels; channel += WARP) {
        sum += get(y[channel]) * get(dy[channel]);
    }
    return sum;
}

// Σ y dy of each query and head, in the layout of the log-sum-exps. A warp computes one sum. If heads are aligned and
// have at most 256 channels, it first copies them to shared memory in accesses of 16 bytes; the order of the sum stays
// the same.
// launch: grid (ceil(rows heads / 8)), block (256)
extern "C" __global__ void __launch_bounds__(256)
    attention_delta(float* delta, const T* y, const T* dy, const int* starts, Attention size) {
    constexpr int WARPS = 8, MOST_CHANNELS = 256;
    using All = Packed<T, WIDE>;
    alignas(16) __shared__ T copied[WARPS][2][MOST_CHANNELS];
    const int lane = threadIdx.x % WARP, channels = size.head_size;
    const long long task = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    const long long row = task / size.heads, head = task % size.heads;
    if (row >= size.rows) {
        return;
    }
    y += task * channels;
    dy += task * channels;
    float sum;
    const bool fits = channels <= MOST_CHANNELS;
    if (fits && are_packed<WIDE>(y, channels, channels) && is_packed<WIDE>(dy, channels)) {
        auto& own = copied[threadIdx.x / WARP];
        const int pieces = channels / WIDE; // of y, and as many of dy
        for (int piece = lane; piece < 2 * pieces; piece += WARP) {
            const int of_dy = piece >= pieces, channel = WIDE * (piece - of_dy * pieces);
            const All all = read_once(reinterpret_cast<const All*>((of_dy ? dy : y) + channel));
            write_once(reinterpret_cast<All*>(&own[of_dy][channel]), all);
        }
        __syncwarp();
        sum = lane_product(own[0], own[1], lane, channels);
    } else {
        sum = lane_product(y, dy, lane, channels);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        const Sequence of = sequence_of(starts, size.sequences, size.rows, row);
        delta[static_cast<long long>(of.first) * size.heads + head * of.count + row - of.first] = sum;
    }
}
#endif

// Defined on sm_70, where quad pairs multiply. The emulator runs the text of sm_70 if SM_70 is defined.
#if ELEMENT == 15 && (defined SM_70 || (!defined EMULATOR && __CUDA_ARCH__ < 750))
#define HAS_QUAD_PAIRS
#endif

// blockIdx.x, read again after a loop, so that numbers that are computed from it take no register during the loop.
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
