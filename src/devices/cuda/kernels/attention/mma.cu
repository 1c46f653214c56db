// Products of a warp on tensor cores, from sm_75 on.

#if ELEMENT != 32 && !defined HAS_QUAD_PAIRS

// The elements of a warp's matrices that one lane holds (PTX ISA, mma.m16n8k16). With row = lane / 4 and
// column = lane % 4 * 2, two neighbours a register:
//   Left (16 × 16):  [row][column], [row + 8][column], [row][column + 8], [row + 8][column + 8]
//   Right (16 × 16): [column][row] and the one below, [column + 8][row] and the one below; then of row + 8
//   Sum (16 × 8):    [row][column], [row][column + 1], [row + 8][column], [row + 8][column + 1]
struct Left {
    unsigned of[4];
};

struct Right {
    unsigned of[4];
};

// A lane's first row and column of a sum, and the distance to its second row.
__device__ inline int lane_row() { return threadIdx.x % WARP / 4; }
__device__ inline int lane_column() { return threadIdx.x % 4 * 2; }
constexpr int NEXT_ROW = 8;

// Lanes that hold the same rows differ in these bits of their numbers alone.
constexpr int OF_ROW[2] = {1, 2};

// Whether registers have room for strips of a left side.
constexpr bool HOLDS = true;

#ifdef EMULATOR

// first, second += a b. Each lane shows its elements, numbered as in the PTX ISA.
template <bool TURNED>
void multiply(Sum& first, Sum& second, const Left& a, const Right& b) {
    const Shown<Left, Right>* const lanes = warp_exchange(show(a, b));
    const emulator::Own own;
    const auto* const of_row = lanes + lane_row() * 4;
    const auto* const of_column = lanes + lane_column() * 4;
    for (int k = 0; k < 16; ++k) {
        const int lane = k % 8 / 2, at = k / 8 * 2 + k % 2;
        for (int row = 0; row < 2; ++row) {
            const float left = of_row[lane].a[k / 8 * 2 + at + 2 * row];
            for (int column = 0; column < 2; ++column) {
                const float* const right = of_column[4 * column + lane].b;
                first.of[2 * row + column] += left * right[at];
                second.of[2 * row + column] += left * right[4 + at];
            }
        }
    }
}

// Loads four matrices of 8 × 8. Lane i gives where row i % 8 of matrix i / 8 begins, and gets [row][column] and its
// neighbour of each; turned, [column][row] and the one below.
template <bool TURNED>
void load(unsigned (&matrices)[4], const T* row_at) {
    hazards_read(row_at, 16);
    const T* const* const rows = warp_exchange(row_at);
    const emulator::Own own;
    const int row = lane_row(), column = lane_column();
    for (int i = 0; i < 4; ++i) {
        const T* const* const of = rows + 8 * i;
        const T low = TURNED ? of[column][row] : of[row][column];
        const T high = TURNED ? of[column + 1][row] : of[row][column + 1];
        matrices[i] = static_cast<unsigned>(high.bits) << 16 | low.bits;
    }
}

#else

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

// first, second += a b, for the first eight columns of b and the others.
template <bool TURNED>
__device__ inline void multiply(Sum& first, Sum& second, const Left& a, const Right& b) {
    multiply(first, a, b.of[0], b.of[1]);
    multiply(second, a, b.of[2], b.of[3]);
}

// Loads four matrices of 8 × 8. Lane i gives where row i % 8 of matrix i / 8 begins, and gets [row][column] and its
// neighbour of each; turned, [column][row] and the one below.
template <bool TURNED>
__device__ inline void load(unsigned (&matrices)[4], const T* row_at) {
    if constexpr (TURNED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                     : "r"(shared_address(row_at))
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                     : "r"(shared_address(row_at))
                     : "memory");
    }
}

#endif

// Where a lane reads sixteen rows of a tile: as a left side, from a first row and channel on; as the columns of a right
// side; as the rows of a right side (turned).
template <int HEAD, int ROWS>
__device__ inline const T* left_in(const Tile<HEAD, ROWS>& tile, int first, int channel) {
    const int lane = threadIdx.x % WARP;
    return tile.of + tile.place(first + lane % 16, channel + lane / 16 * 8);
}

template <int HEAD, int ROWS>
__device__ inline const T* right_in(const Tile<HEAD, ROWS>& tile) {
    const int lane = threadIdx.x % WARP;
    return tile.of + tile.place(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
}

template <int HEAD, int ROWS>
__device__ inline const T* turned_in(const Tile<HEAD, ROWS>& tile) {
    const int lane = threadIdx.x % WARP;
    return tile.of + tile.place(lane % 16, lane / 16 * 8);
}

// Reads a left side, a right side and a turned right side from there.
__device__ inline Left left_at(const T* at) {
    Left left;
    load<false>(left.of, at);
    return left;
}

__device__ inline Right right_at(const T* at) {
    Right right;
    load<false>(right.of, at);
    return right;
}

template <int PITCH>
__device__ inline Right turned_at(const T* at) {
    Right right;
    load<true>(right.of, at);
    return right;
}

// Two sums side by side, as a left side: a warp holds both in the same layout.
__device__ inline Left left_of(const Sum& first, const Sum& second) {
    return {{pack(first.of[0], first.of[1]), pack(first.of[2], first.of[3]),
             pack(second.of[0], second.of[1]), pack(second.of[2], second.of[3])}};
}

#endif
