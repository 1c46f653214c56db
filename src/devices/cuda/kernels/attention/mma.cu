// Products of a warp on tensor cores, and copies to shared memory.

#ifdef HAS_TENSOR_CORES

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

#endif
