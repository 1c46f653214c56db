// Tiles in shared memory, and products of them, by a warp or by a warpgroup.

#if ELEMENT != 32

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

    // Rows that are a multiple of eight apart have their places PITCH apart each.
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
        at = left_in(tile, first, 0);
    }

    __device__ Left part(int channel) const { return left_at(at + channel); }
};

template <class Tile>
struct Strip<Tile, true> {
    Left parts[Tile::HEAD / 16];

    __device__ void take(const Tile& tile, int first) {
#pragma unroll
        for (int channel = 0; channel < Tile::HEAD; channel += 16) {
            parts[channel / 16] = left_at(left_in(tile, first, channel));
        }
    }

    __device__ Left part(int channel) const { return parts[channel / 16]; }
};

#ifdef HAS_WGMMA

// For wgmma, 64 rows of a warpgroup, which stay in shared memory.
template <int HEAD, int ROWS>
struct Strip<Swizzled<HEAD, ROWS>, false> {
    const Swizzled<HEAD, ROWS>* tile;

    __device__ void take(const Swizzled<HEAD, ROWS>& of, int) { tile = &of; }

    __device__ Descriptor part(int channel) const {
        return tile->descriptor(threadIdx.x / WARPGROUP * 64, channel);
    }
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

// Products of strips of a and each row of b, over all channels.
template <int HEAD, int COLUMNS, class A, bool HELD, int STRIPS>
__device__ inline void products(Sums<STRIPS, COLUMNS>& sums, const Strip<A, HELD> (&a)[STRIPS],
                                const Padded<HEAD, COLUMNS>& tile) {
    constexpr int PITCH = Padded<HEAD, COLUMNS>::PITCH;
    const T* const b = right_in(tile);
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
            const Right right = right_at(b + column * PITCH + channel);
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                multiply<false>(sums[strip][column / 8], sums[strip][column / 8 + 1], left[strip], right);
            }
        }
    }
}

// sums += p x: p has a column for each row of x, of which it takes COLUMNS channels from `part` on.
template <int COLUMNS, int HEAD, int MIXED, int STRIPS>
__device__ inline void mix(Sums<STRIPS, COLUMNS>& sums, const Sums<STRIPS, MIXED>& p,
                           const Padded<HEAD, MIXED>& tile, int part = 0) {
    constexpr int PITCH = Padded<HEAD, MIXED>::PITCH;
    const T* const x = turned_in(tile) + part;
#pragma unroll
    for (int row = 0; row < MIXED; row += 16) {
        Left left[STRIPS];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            left[strip] = left_of(p[strip][row / 8], p[strip][row / 8 + 1]);
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; column += 16) {
            const Right right = turned_at<PITCH>(x + row * PITCH + column);
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                multiply<true>(sums[strip][column / 8], sums[strip][column / 8 + 1], left[strip], right);
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
    hold(left);
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
                           [[maybe_unused]] int part = 0) {
    static_assert(COLUMNS == HEAD, "a block takes all channels");
    Left left[MIXED / 16];
    pack_sums(left, p[0]);
    mix(sums, left, x);
}

#endif

#endif
