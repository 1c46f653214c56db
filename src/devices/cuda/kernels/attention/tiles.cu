// Tiles in shared memory, and their products by a warp.

#if ELEMENT != 32

// Begins to copy rows to a tile, with zeros past the last row and past the last channel. A thread copies the same
// channels of every STEP-th row.
template <int THREADS, int HEAD, int ROWS>
__device__ inline void copy_rows(Tile<HEAD, ROWS>& tile, const Rows& rows) {
    constexpr int OF_ROW = HEAD / 8, STEP = THREADS / OF_ROW, PITCH = Tile<HEAD, ROWS>::PITCH;
    static_assert(THREADS % OF_ROW == 0 && ROWS % STEP == 0, "threads copy whole rows");
    const bool is_aligned = reinterpret_cast<unsigned long long>(rows.at) % 16 == 0 && rows.channels % 8 == 0;
    const int first = threadIdx.x / OF_ROW, channel = threadIdx.x % OF_ROW * 8;
    const int count = rows.channels > channel ? rows.count - first : 0;
    const T* const from = rows.at + first * rows.stride + channel;
    T* const to = tile.of + tile.place(first, channel);
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

// Sixteen rows of a left side. HELD: a lane reads them from shared memory once and holds them in registers; else it
// reads them for each product.
template <int HEAD, bool HELD>
struct Strip {
    const T* at;

    template <int ROWS>
    __device__ void take(const Tile<HEAD, ROWS>& tile, int first) {
        at = left_in(tile, first, 0);
    }

    __device__ Left part(int channel) const { return left_at(at + channel); }
};

template <int HEAD>
struct Strip<HEAD, true> {
    Left parts[HEAD / 16];

    template <int ROWS>
    __device__ void take(const Tile<HEAD, ROWS>& tile, int first) {
#pragma unroll
        for (int channel = 0; channel < HEAD; channel += 16) {
            parts[channel / 16] = left_at(left_in(tile, first, channel));
        }
    }

    __device__ Left part(int channel) const { return parts[channel / 16]; }
};

// Takes a warp's strips of a tile.
template <int HEAD, bool HELD, int STRIPS, int ROWS>
__device__ inline void take(Strip<HEAD, HELD> (&strips)[STRIPS], const Tile<HEAD, ROWS>& tile) {
    const int first = threadIdx.x / WARP * 16 * STRIPS;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
        strips[strip].take(tile, first + 16 * strip);
    }
}

// The sums of a warp's strips, each with COLUMNS columns.
template <int STRIPS, int COLUMNS>
using Sums = Sum[STRIPS][COLUMNS / 8];

// sums = a bᵀ, over all channels: a column of sums for each row of the tile b.
template <int HEAD, int COLUMNS, bool HELD, int STRIPS>
__device__ inline void products(Sums<STRIPS, COLUMNS>& sums, const Strip<HEAD, HELD> (&a)[STRIPS],
                                const Tile<HEAD, COLUMNS>& tile) {
    constexpr int PITCH = Tile<HEAD, COLUMNS>::PITCH;
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

// sums += p x, for COLUMNS channels of the tile x from `part` on. p has a column for each row of x.
template <int COLUMNS, int HEAD, int MIXED, int STRIPS>
__device__ inline void mix(Sums<STRIPS, COLUMNS>& sums, const Sums<STRIPS, MIXED>& p,
                           const Tile<HEAD, MIXED>& tile, int part = 0) {
    constexpr int PITCH = Tile<HEAD, MIXED>::PITCH;
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

#endif
