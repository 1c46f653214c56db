// Code that all kernels share. This text is put in front of each file's text, because NVRTC finds no files to include.
//
// The macro ELEMENT is the dtype of weights and activations: 32 (float), 16 (bfloat16) or 15 (half). Arithmetic,
// statistics, partial sums and gradients of weights are in float. No kernel uses atomics, so the order of every sum
// follows from shapes alone. EMULATOR is defined where the text is compiled for a CPU, behind emulator.h
// (tests/cuda/kernels).
//
// The comment `launch` above a kernel is its grid and its block; tests read it. In most kernels a thread has four
// neighbouring channels: then threads(channels) = min(256, 32 ceil(channels / 128)). In some it has `wide` channels,
// which fill 16 bytes.

#ifndef ELEMENT
#define ELEMENT 32
#endif

// ---- Elements: float get(T), T put(float), rounded to nearest even. ----

__device__ inline float get(float x) { return x; }
__device__ inline void set(float& to, float x) { to = x; }

#if ELEMENT == 32

using T = float;

#elif ELEMENT == 16

struct Bfloat {
    unsigned short bits;
};
using T = Bfloat;

__device__ inline float get(Bfloat x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

__device__ inline void set(Bfloat& to, float x) {
#ifdef EMULATOR
    to.bits = emulator::bfloat_bits(x);
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#endif
}

#elif ELEMENT == 15

struct Half {
    unsigned short bits;
};
using T = Half;

__device__ inline float get(Half x) {
#ifdef EMULATOR
    return emulator::half_value(x.bits);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
    return value;
#endif
}

__device__ inline void set(Half& to, float x) {
#ifdef EMULATOR
    to.bits = emulator::half_bits(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#endif
}

#else
#error "ELEMENT is 32, 16 or 15"
#endif

__device__ inline T put(float x) {
    T to;
    set(to, x);
    return to;
}

// ---- Reads and writes of four or more neighbours: one access if they are aligned, else one by one. ----

template <int N>
struct Some {
    float of[N];
};

using Four = Some<4>;

// As many elements as 16 bytes have, the most that one access moves.
[[maybe_unused]] constexpr int WIDE = 16 / sizeof(T);

template <class E, int N = 4>
struct alignas(N * sizeof(E)) Packed {
    E of[N];
};

// Memory that is read or written by one instruction.
template <class V>
__device__ inline V read_once(const V* from) {
#ifdef EMULATOR
    hazards_read(from, sizeof(V));
    const emulator::Own own;
#endif
    return *from;
}

template <class V>
__device__ inline void write_once(V* to, const V& value) {
#ifdef EMULATOR
    hazards_write(to, sizeof(V));
    const emulator::Own own;
#endif
    *to = value;
}

template <int N = 4, class E>
__device__ inline bool is_packed(const E* at, int count) {
    return count >= N && reinterpret_cast<unsigned long long>(at) % sizeof(Packed<E, N>) == 0;
}

// The first `count` of N neighbours, and 0 for the rest. PACKED: reads all N in one access.
template <bool PACKED, int N = 4, class E>
__device__ inline Some<N> read_as(const E* from, int count) {
    Some<N> values = {};
    if constexpr (PACKED) {
        const Packed<E, N> all = read_once(reinterpret_cast<const Packed<E, N>*>(from));
        for (int i = 0; i < N; ++i) {
            values.of[i] = get(all.of[i]);
        }
    } else {
        for (int i = 0; i < N; ++i) {
            if (i < count) {
                values.of[i] = get(from[i]);
            }
        }
    }
    return values;
}

template <int N = 4, class E>
__device__ inline Some<N> read(const E* from, int count) {
    return is_packed<N>(from, count) ? read_as<true, N>(from, count) : read_as<false, N>(from, count);
}

// Whether the neighbours at this place are packed in every row of `channels`. Loops over rows test it once, before
// the loop, so that their loads do not wait for each other.
template <int N = 4, class E>
__device__ inline bool are_packed(const E* at, int count, int channels) {
    return is_packed<N>(at, count) && channels % N == 0;
}

// Writes the first `count` of N neighbours.
template <int N, class E>
__device__ inline void write(E* to, const Some<N>& values, int count) {
    if (is_packed<N>(to, count)) {
        Packed<E, N> all;
        for (int i = 0; i < N; ++i) {
            set(all.of[i], values.of[i]);
        }
        write_once(reinterpret_cast<Packed<E, N>*>(to), all);
    } else {
        for (int i = 0; i < N; ++i) {
            if (i < count) {
                set(to[i], values.of[i]);
            }
        }
    }
}

// This thread's first column of N, where blocks of threads(channels) lie along the grid's y: for N of 4, the grid is
// (..., ceil(channels / 1024)).
template <int N = 4>
__device__ inline int my_column() {
    return N * (blockIdx.y * blockDim.x + threadIdx.x);
}

// ---- Sums and maxima over threads. ----

constexpr int WARP = 32;
constexpr unsigned FULL_MASK = 0xFFFFFFFF;

__device__ inline float infinity() { return __int_as_float(0x7F800000); }

// The sum over the warp; all lanes get it.
template <class V>
__device__ inline V warp_sum(V x) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(FULL_MASK, x, step);
    }
    return x;
}

__device__ inline float warp_max(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
    }
    return x;
}

// The sum over the block; all threads get it, and all must call it. The block is one row of whole warps.
template <class V>
__device__ inline V block_sum(V x) {
    __shared__ V sums[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads(); // the sums of the call before have been read
    if (lane == 0) {
        sums[warp] = x;
    }
    __syncthreads();
    return warp_sum(lane < warps ? sums[lane] : V{});
}

// Of a block's threads that have something: how many come before this one, and how many there are.
struct Rank {
    int before, all;
};

// All threads must call it. The block is one row of whole warps.
__device__ inline Rank block_rank(bool has) {
    __shared__ int counts[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const unsigned in_warp = __ballot_sync(FULL_MASK, has);
    if (lane == 0) {
        counts[warp] = __popc(in_warp);
    }
    __syncthreads();
    Rank rank = {__popc(in_warp & ((1U << lane) - 1)), 0};
    for (int other = 0; other < warps; ++other) {
        rank.before += other < warp ? counts[other] : 0;
        rank.all += counts[other];
    }
    __syncthreads(); // all threads have read the counts before they change
    return rank;
}

// ---- Dropout by a counter-based generator: the mask is a function of the position alone. ----

struct Dropout {
    unsigned key[2];
    unsigned first_sequence, first_position, site;
    unsigned threshold; // 0: none
    float scale;
};

struct Draws {
    unsigned of[4];
};

// Philox 4x32 with ten rounds (Salmon et al. 2011).
__device__ inline Draws philox(Draws counter, unsigned key_0, unsigned key_1) {
    for (int round = 0; round < 10; ++round) {
        const unsigned long long low = counter.of[0] * 0xD2511F53ULL;
        const unsigned long long high = counter.of[2] * 0xCD9E8D57ULL;
        counter = {static_cast<unsigned>(high >> 32) ^ counter.of[1] ^ key_0, static_cast<unsigned>(high),
                   static_cast<unsigned>(low >> 32) ^ counter.of[3] ^ key_1, static_cast<unsigned>(low)};
        key_0 += 0x9E3779B9;
        key_1 += 0xBB67AE85;
    }
    return counter;
}

// Four columns from `column`, a multiple of 4, of a row of a sequence of this micro-batch: 0 or the scale.
__device__ inline Four dropout_factors(const Dropout& dropout, unsigned sequence, unsigned row,
                                       unsigned column) {
    const Draws counter = {column / 4, dropout.first_position + row, dropout.first_sequence + sequence,
                           dropout.site};
    const Draws draws = philox(counter, dropout.key[0], dropout.key[1]);
    Four factors;
    for (int i = 0; i < 4; ++i) {
        factors.of[i] = draws.of[i] < dropout.threshold ? 0.0f : dropout.scale;
    }
    return factors;
}

// ---- Sizes. ----

// Sizes of attention: rows of B sequences, each with `past` cached positions before; H heads, K key and value heads.
struct Attention {
    int sequences, rows, past, heads, kv_heads, head_size;
    int ahead, window; // the positions that a query sees from its own on, and up to its own; 0: all
    int first_kept; // the first position whose keys and values a tensor of their own has
    float scale;
    Dropout dropout;
};

// How heads are rotated: the frequency of each pair of channels, and the factor of rotated channels. The first channel of
// a pair is `pairs` before the second, or, if they are interleaved, one; channels behind the pairs stay as they are.
struct Rotary {
    float frequencies[128];
    float scale;
    int pairs, interleaved, distance;
    // Queries have the factor 1 + beta ln(1 + floor(position / positions)), if `positions` is not 0.
    float beta;
    int positions;
};

// The sequence of a row: its index, its first row, and its number of rows.
struct Sequence {
    int index, first, count;
};

// starts: the first row of each sequence and the row behind the last, or null where all have as many rows.
__device__ inline Sequence sequence_at(const int* starts, int sequences, int rows, int index) {
    const int each = rows / sequences;
    return starts == nullptr ? Sequence{index, index * each, each}
                             : Sequence{index, starts[index], starts[index + 1] - starts[index]};
}

__device__ inline Sequence sequence_of(const int* starts, int sequences, int rows, int row) {
    if (starts == nullptr) {
        return sequence_at(starts, sequences, rows, row / (rows / sequences));
    }
    int from = 0, to = sequences; // one of the sequences from..to has the row
    while (to - from > 1) {
        const int middle = (from + to) / 2;
        (starts[middle] <= row ? from : to) = middle;
    }
    return sequence_at(starts, sequences, rows, from);
}

// Neighbours from `column` on of a row, dropped or scaled.
template <int N>
__device__ inline void apply_mask(Some<N>& values, const Dropout& dropout, const int* starts, int sequences,
                                  int rows, int row, int column) {
    if (dropout.threshold == 0) {
        return;
    }
    const Sequence sequence = sequence_of(starts, sequences, rows, row);
    const int position = row - sequence.first;
#pragma unroll
    for (int first = 0; first < N; first += 4) {
        const Four factors = dropout_factors(dropout, sequence.index, position, column + first);
        for (int i = 0; i < 4; ++i) {
            values.of[first + i] *= factors.of[i];
        }
    }
}

// The position of a row in its document. The first row of its sequence is at position `past`.
// documents: (rows, 2), from and to, or null.
__device__ inline int position_of(const unsigned* documents, int past, const Sequence& sequence, int row) {
    const int position = past + row - sequence.first;
    return documents == nullptr ? position : position - static_cast<int>(documents[2 * (past + row)]);
}

// A block's dynamic shared memory.
#ifndef EMULATOR
#define DYNAMIC_SHARED(type, name)                                \
    alignas(16) extern __shared__ unsigned char dynamic_shared[]; \
    type* const name = reinterpret_cast<type*>(dynamic_shared)
#endif
