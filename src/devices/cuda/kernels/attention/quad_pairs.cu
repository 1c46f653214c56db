// Products of a warp on the tensor cores of sm_70: mma.m8n8k4, by quad pairs.

#ifdef HAS_QUAD_PAIRS

// A quad pair is four lanes and the four lanes whose numbers are 16 higher. It multiplies a matrix of 8 × 4 by one of
// 4 × 8 (PTX ISA, mma.m8n8k4). A warp has four quad pairs. Here they compute a sum of 16 × 16 together: bit 3 of a
// lane's number says which eight rows its quad pair has, bit 2 which columns, of every eight the first four or the last
// four. So a warp holds sums in the layout of sm_75, with its lanes in another order. A lane holds
//   of Left (16 × 16):  all columns of one row, two a register
//   of Right (16 × 16): all rows of one column; turned, four columns of every fourth row
//   of Sum (16 × 8):    [row][column], [row][column + 1], [row + 2][column], [row + 2][column + 1]
struct Left {
    unsigned of[8];
};

struct Right {
    unsigned of[8];
};

// A lane's first row and column of a sum, and the distance to its second row.
__device__ inline int lane_row() {
    const int lane = threadIdx.x % WARP;
    return lane / 8 % 2 * 8 + lane / 16 * 4 + lane % 2;
}
__device__ inline int lane_column() { return threadIdx.x & 6; }
constexpr int NEXT_ROW = 2;

// Lanes that hold the same rows differ in these bits of their numbers alone.
constexpr int OF_ROW[2] = {2, 4};

// Whether registers have room for strips of a left side: here a strip takes twice as many as elsewhere.
constexpr bool HOLDS = false;

#ifdef EMULATOR

// first, second += a b. Each lane shows its elements, numbered as in the PTX ISA.
template <bool TURNED>
void multiply(Sum& first, Sum& second, const Left& a, const Right& b) {
    const Shown<Left, Right>* const lanes = warp_exchange(show(a, b));
    const emulator::Own own;
    const int lane = threadIdx.x % WARP, first_row = lane / 16 * 4 + lane % 2;
    const auto* const of_pair = lanes + lane % 16 / 4 * 4; // and so its second four lanes are 16 behind
    for (int k = 0; k < 16; ++k) {
        float right[4]; // of two columns of each side
        for (int i = 0; i < 4; ++i) {
            const int column = (lane & 2) + i % 2;
            const int lane_of_b = i / 2 * 16 + (TURNED ? k % 4 : column);
            right[i] = of_pair[lane_of_b].b[TURNED ? k / 4 * 4 + column : k];
        }
        for (int row = 0; row < 2; ++row) {
            const int at = first_row + 2 * row;
            const float left = of_pair[at / 4 * 16 + at % 4].a[k];
            for (int column = 0; column < 2; ++column) {
                first.of[2 * row + column] += left * right[column];
                second.of[2 * row + column] += left * right[2 + column];
            }
        }
    }
}

#else

// first, second += a b, four columns of a at a time.
template <bool TURNED>
__device__ inline void multiply(Sum& first, Sum& second, const Left& a, const Right& b) {
#define MULTIPLY(b_layout)                                                                            \
    asm volatile("mma.sync.aligned.m8n8k4.row." b_layout ".f32.f16.f16.f32"                           \
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};" \
                 : "+f"(first.of[0]), "+f"(first.of[1]), "+f"(first.of[2]), "+f"(first.of[3]),        \
                   "+f"(second.of[0]), "+f"(second.of[1]), "+f"(second.of[2]), "+f"(second.of[3])     \
                 : "r"(a.of[2 * step]), "r"(a.of[2 * step + 1]), "r"(b.of[2 * step]), "r"(b.of[2 * step + 1]))
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        if constexpr (TURNED) {
            MULTIPLY("row");
        } else {
            MULTIPLY("col");
        }
    }
#undef MULTIPLY
}

#endif

// Where a lane reads sixteen rows of a tile: as a left side, from a first row and channel on; as the columns of a right
// side; as the rows of a right side (turned). Eight rows have no bank conflict.
template <int HEAD, int ROWS>
__device__ inline const T* left_in(const Tile<HEAD, ROWS>& tile, int first, int channel) {
    const int lane = threadIdx.x % WARP;
    return tile.of + tile.place(first + lane / 8 % 2 * 8 + lane / 16 * 4 + lane % 4, channel);
}

template <int HEAD, int ROWS>
__device__ inline const T* right_in(const Tile<HEAD, ROWS>& tile) {
    const int lane = threadIdx.x % WARP;
    return tile.of + tile.place(lane / 16 * 8 + lane % 8, 0);
}

template <int HEAD, int ROWS>
__device__ inline const T* turned_in(const Tile<HEAD, ROWS>& tile) {
    const int lane = threadIdx.x % WARP;
    return tile.of + tile.place(lane % 4, lane / 16 * 8 + (lane & 4));
}

// Reads from there: sixteen neighbours, or, turned, four neighbours of every fourth row.
template <int COUNT>
__device__ inline void read_words(unsigned* to, const T* at) {
    const auto words = read_once(reinterpret_cast<const Packed<unsigned, COUNT>*>(at));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        to[i] = words.of[i];
    }
}

__device__ inline Left left_at(const T* at) {
    Left left;
    read_words<4>(left.of, at);
    read_words<4>(left.of + 4, at + 8);
    return left;
}

__device__ inline Right right_at(const T* at) {
    Right right;
    read_words<4>(right.of, at);
    read_words<4>(right.of + 4, at + 8);
    return right;
}

template <int PITCH>
__device__ inline Right turned_at(const T* at) {
    Right right;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        read_words<2>(right.of + 2 * step, at + 4 * step * PITCH);
    }
    return right;
}

// Two sums side by side, as a left side. Of two lanes whose numbers differ in bit 1, one gives the other its numbers
// of one row and gets those of the other row; then two whose numbers differ in bit 2 show each other what they have of
// their row.
__device__ inline Left left_of(const Sum& first, const Sum& second) {
    const bool is_next = threadIdx.x & 2, is_behind = threadIdx.x & 4;
    Left left;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Sum& sum = half == 0 ? first : second;
        const unsigned row = pack(sum.of[0], sum.of[1]), next_row = pack(sum.of[2], sum.of[3]);
        const unsigned own = is_next ? next_row : row;
        const unsigned given = __shfl_xor_sync(FULL_MASK, is_next ? row : next_row, 2);
        const unsigned low = is_next ? given : own, high = is_next ? own : given;
        const unsigned other_low = __shfl_xor_sync(FULL_MASK, low, 4), other_high = __shfl_xor_sync(FULL_MASK, high, 4);
        left.of[4 * half] = is_behind ? other_low : low;
        left.of[4 * half + 1] = is_behind ? other_high : high;
        left.of[4 * half + 2] = is_behind ? low : other_low;
        left.of[4 * half + 3] = is_behind ? high : other_high;
    }
    return left;
}

#endif
